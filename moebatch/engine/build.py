"""From a model folder and a policy to an engine that can run."""

from dataclasses import dataclass
from pathlib import Path

from moebatch.engine.device import IN_MAIN_MEMORY, Device
from moebatch.engine.engine import Engine
from moebatch.engine.made import Made
from moebatch.engine.model_files import ModelFiles
from moebatch.engine.on_cpu import cpu_pipeline, plain_sweep
from moebatch.engine.on_gpu import gpu_pipeline
from moebatch.engine.order import Order
from moebatch.engine.pass_log import PassLog
from moebatch.engine.recorder import Recorder
from moebatch.engine.sampler import Sampler
from moebatch.engine.text import TextDecoder
from moebatch.predict.correlation import CorrelationPredictor
from moebatch.predict.path_table import PathTable
from moebatch.predict.predictor import Predictor, RoutingObserver
from moebatch.spec.policy import Policy
from moebatch.spec.shape import ModelShape
from moebatch.store.experts import ExpertStore
from moebatch.store.kv import KVCache


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """An engine with the parts that whoever started it looks at."""

    engine: Engine
    made: Made
    recorder: Recorder | None
    """What the lanes do; None where there are none."""
    log: PassLog | None = None
    """What the passes had to do whose timeline is kept."""

    @property
    def experts(self) -> ExpertStore:
        """Those in main memory."""
        return self.made.experts

    @property
    def cache(self) -> KVCache:
        """Keys and values."""
        return self.made.cache

    def close(self) -> None:
        """Ends lanes and readers, and gives files back."""
        self.made.close()


def build_engine(
    files: ModelFiles,
    policy: Policy,
    *,
    decoder: TextDecoder,
    end_tokens: frozenset[int],
    job_seed: int,
    max_tokens: int,
    device: Device = IN_MAIN_MEMORY,
    plain: bool = False,
    predictor: Predictor | None = None,
    observer: RoutingObserver | None = None,
    scratch: Path | None = None,
    num_traced_passes: int = 0,
) -> BuiltEngine:
    """Allocates everything that `policy` says and loads the weights outside the experts.

    Args:
        max_tokens: the longest sequence, prompt and answer, that the engine may meet.
        plain: everything one after the other, in main memory, instead of the policy's schedule.
        predictor: which experts next; None learns their frequencies as it goes.
        observer: told what the gates choose.
        scratch: folder for keys and values that live on disk.
        num_traced_passes: passes whose timeline is kept task by task.
    """
    assert not (observer and num_traced_passes), "one looks at the gates"
    log = PassLog(files.shape, num_traced_passes) if num_traced_passes and not plain else None
    order = Order(
        files=files,
        policy=policy,
        max_tokens=max_tokens,
        predictor=predictor or _frequencies(files.shape),
        observer=observer or log,
        log=log,
        scratch=scratch,
    )
    recorder = Recorder(files.shape.num_layers, num_traced_passes)
    made = _make(order, device, recorder, plain=plain)
    sampler = Sampler(vocab_size=files.shape.vocab_size, end_tokens=end_tokens, job_seed=job_seed)
    engine = Engine(
        sweep=made.passes,
        cache=made.cache,
        policy=policy,
        sampler=sampler,
        decoder=decoder,
        end_tokens=end_tokens,
    )
    return BuiltEngine(
        engine=engine,
        made=made,
        recorder=None if plain else recorder,
        log=log,
    )


def _make(order: Order, device: Device, recorder: Recorder, *, plain: bool) -> Made:
    if plain:
        return plain_sweep(order)
    if device.with_vram:
        return gpu_pipeline(order, device, recorder)
    return cpu_pipeline(order, recorder)


def _frequencies(shape: ModelShape) -> Predictor:
    """How often each expert has been chosen so far."""
    table = PathTable.empty(
        shape.moe_layers,
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        path_length=0,
    )
    return CorrelationPredictor(table)
