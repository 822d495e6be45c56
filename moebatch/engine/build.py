"""From a model folder and a policy to an engine that can run."""

from contextlib import ExitStack
from dataclasses import dataclass

from moebatch.engine.assembly import Runtime, assemble, assemble_plain
from moebatch.engine.engine import Engine
from moebatch.engine.pass_log import PassLog
from moebatch.engine.recorder import Recorder
from moebatch.engine.sampler import Sampler
from moebatch.engine.spec import EngineSpec
from moebatch.engine.text import TextDecoder


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """An engine with what tests and reports look at."""

    engine: Engine
    runtime: Runtime
    opened: ExitStack
    """Ends lanes and readers, and gives files back."""
    recorder: Recorder | None
    """What the lanes do; None where there are none."""
    log: PassLog | None = None
    """What the passes had to do whose timeline is kept."""

    def close(self) -> None:
        """Ends lanes and readers, and gives files back."""
        self.opened.close()


def build_engine(
    spec: EngineSpec, *, decoder: TextDecoder, end_tokens: frozenset[int], job_seed: int
) -> BuiltEngine:
    """Allocates everything that the policy says and loads the weights outside the experts.

    Raises DoesNotFit if the device has no room for what the policy puts there.
    """
    shape = spec.files.shape
    recorder = None if spec.is_plain else Recorder(shape.num_layers, spec.num_traced_passes)
    log = PassLog(shape, spec.num_traced_passes) if recorder and spec.num_traced_passes else None
    with ExitStack() as opening:
        if recorder is None:
            runtime = assemble_plain(spec, opening)
        else:
            runtime = assemble(spec, recorder, log, opening)
        opened = opening.pop_all()
    engine = Engine(
        sweep=runtime.passes,
        cache=runtime.cache,
        policy=spec.policy,
        sampler=Sampler(vocab_size=shape.vocab_size, end_tokens=end_tokens, job_seed=job_seed),
        decoder=decoder,
        end_tokens=end_tokens,
        tail=runtime.tail,
    )
    return BuiltEngine(engine=engine, runtime=runtime, opened=opened, recorder=recorder, log=log)
