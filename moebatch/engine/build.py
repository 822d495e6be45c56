"""From a model folder and a policy to an engine that can run."""

from contextlib import ExitStack
from dataclasses import dataclass

from moebatch.engine.engine import Engine
from moebatch.engine.made import Made
from moebatch.engine.on_cpu import cpu_pipeline, plain_sweep
from moebatch.engine.on_gpu import gpu_pipeline
from moebatch.engine.order import Order
from moebatch.engine.pass_log import PassLog
from moebatch.engine.recorder import Recorder
from moebatch.engine.sampler import Sampler
from moebatch.engine.text import TextDecoder
from moebatch.schedule.foresight import Foresight
from moebatch.store.experts import ExpertStore
from moebatch.store.kv import KVCache


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """An engine with the parts that whoever started it looks at."""

    engine: Engine
    made: Made
    opened: ExitStack
    """Ends lanes and readers, and gives files back."""
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

    @property
    def foresight(self) -> Foresight:
        """How well experts have been foreseen."""
        return self.made.foresight

    def close(self) -> None:
        """Ends lanes and readers, and gives files back."""
        self.opened.close()


def build_engine(
    order: Order, *, decoder: TextDecoder, end_tokens: frozenset[int], job_seed: int
) -> BuiltEngine:
    """Allocates everything that the policy says and loads the weights outside the experts.

    Raises DoesNotFit if the device has no room for what the policy puts there.
    """
    shape = order.files.shape
    recorder = None if order.is_plain else Recorder(shape.num_layers, order.num_traced_passes)
    log = PassLog(shape, order.num_traced_passes) if recorder and order.num_traced_passes else None
    with ExitStack() as opening:
        made = _make(order, recorder, log, opening)
        opened = opening.pop_all()
    engine = Engine(
        sweep=made.passes,
        cache=made.cache,
        policy=order.policy,
        sampler=Sampler(vocab_size=shape.vocab_size, end_tokens=end_tokens, job_seed=job_seed),
        decoder=decoder,
        end_tokens=end_tokens,
        tail=made.tail,
    )
    return BuiltEngine(engine=engine, made=made, opened=opened, recorder=recorder, log=log)


def _make(order: Order, recorder: Recorder | None, log: PassLog | None, opened: ExitStack) -> Made:
    """Whatever has been `opened` is closed again should anything fail."""
    if recorder is None:
        return plain_sweep(order, opened)
    if order.device.with_vram:
        return gpu_pipeline(order, recorder, log, opened)
    return cpu_pipeline(order, recorder, log, opened)
