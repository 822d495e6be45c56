"""What the command line of `moebatch plan` asks for, before it is looked up."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from moebatch.spec.model.cache_layout import KvCache, SinkWindow, StateCache
from moebatch.spec.option import WEIGHTS, Option, Options

if TYPE_CHECKING:  # `moebatch --help` need not load them
    from moebatch.plan.simulation.world import Routing
    from moebatch.schedule.task import Kind
    from moebatch.spec.machine.hardware import Basis
    from moebatch.spec.policy.file import PolicyFile
    from moebatch.spec.workload import Workload

ChosenMethod = Literal["milp", "klotski"]
ScheduleName = Annotated[str | None, Option("Plan for this schedule: a name, or file.py:name.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions(Options):
    """Options by their long names; None where they are not given."""

    hw: Annotated[
        str | None, Option("Hardware profile, a name or a file; default: this machine.")
    ] = None
    model: Annotated[str | None, Option("Model shape, a name, a folder or a file.")] = None
    prompt_len: Annotated[int | None, Option("Mean prompt tokens.", min=1, max=10**7)] = None
    gen_len: Annotated[int | None, Option("New tokens per sequence.", min=1, max=10**7)] = None
    requests: Annotated[int | None, Option("Sequences of the job.", min=1, max=10**12)] = None
    what_if: Annotated[
        tuple[str, ...],
        Option("Change a figure, such as dram=416GiB, or weights=int4; repeatable."),
    ] = ()
    weights: Annotated[
        str | None,
        Option("Format of experts, such as int4, int8 or fp8; default: as published, or stored."),
    ] = None
    kv_cache: Annotated[
        KvCache | None, Option("How keys and values are cached; default: as the job says.")
    ] = None
    state_cache: Annotated[
        StateCache | None,
        Option("How states of recurrent layers are kept; default: as the job says."),
    ] = None
    attention: Annotated[
        str | None, Option("Sinks and window, such as 4+1024; default: as the job says.")
    ] = None
    method: Annotated[ChosenMethod, Option("How to choose the policy.")] = "milp"
    paper: Annotated[bool, Option("MoE-Lightning's own forms and constants.")] = False
    vendor: Annotated[bool, Option("Figures of data sheets instead of measured ones.")] = False
    policy: Annotated[
        str | None, Option("This policy, a name or a file, instead of planning one.")
    ] = None
    schedule: ScheduleName = None
    has_job: bool = False
    """Whether a job file is given, which says model and lengths itself."""
    command: str = "moebatch plan"
    """What was typed."""

    @property
    def basis(self) -> "Basis":
        """Which figures of the profile are meant."""
        return "paper" if self.paper else "peak" if self.vendor else "achieved"

    @property
    def sink_window(self) -> SinkWindow | None:
        """That of ``--attention``."""
        return None if self.attention is None else SinkWindow.parse(self.attention)

    @property
    def figures(self) -> tuple[str, ...]:
        """Changes of the machine's figures."""
        return tuple(change for name, _, change in self._changes() if name != WEIGHTS)

    @property
    def stored(self) -> str | None:
        """Name of the format that experts are supposed to be stored in, if any is given."""
        named = [value for name, value, _ in self._changes() if name == WEIGHTS]
        return named[-1] if named else self.weights

    def _changes(self) -> Iterator[tuple[str, str, str]]:
        for change in self.what_if:
            name, _, value = change.partition("=")
            yield name.strip(), value.strip(), change

    def stated_workload(self) -> "Workload":
        """The workload of ``--prompt-len``, ``--gen-len`` and ``--requests``."""
        from moebatch.spec.workload import Workload

        assert self.prompt_len is not None and self.gen_len is not None, "checked before"
        return Workload.uniform(
            prompt_tokens=self.prompt_len, new_tokens=self.gen_len, num_sequences=self.requests
        )

    def given_policy(self) -> "PolicyFile | None":
        """The policy of ``--policy``, if there is one. Raises ConfigError."""
        from moebatch.schedule.registry import schedule_faults
        from moebatch.spec.policy.file import load_policy

        return None if self.policy is None else load_policy(self.policy, rules=schedule_faults)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        from moebatch.schedule.registry import unknown_schedule
        from moebatch.spec.model.named_formats import unknown_format

        lengths = {
            "--model": self.model,
            "--prompt-len": self.prompt_len,
            "--gen-len": self.gen_len,
        }
        for option, value in lengths.items():
            if self.has_job and value is not None:
                yield option, "not together with a job file, which says it itself"
            if not self.has_job and value is None:
                yield option, "is missing; give a job file, or --model, --prompt-len and --gen-len"
        if self.has_job and self.requests is not None:
            yield "--requests", "not together with a job file, whose input is counted"
        try:
            _ = self.sink_window
        except ValueError as error:
            yield "--attention", str(error)
        if self.stored is not None:
            where = "--weights" if self.stored == self.weights else "--what-if: weights"
            yield from ((where, message) for message in unknown_format(self.stored))
        changed = Counter(name.removesuffix(".capacity") for name, _, _ in self._changes())
        changed[WEIGHTS] += self.weights is not None
        for name, count in changed.items():
            if count > 1:
                also = " (--weights is one)" * (name == WEIGHTS and self.weights is not None)
                yield "--what-if", f"{name} is given {count} times{also}; give one"
        if self.paper and self.vendor:
            yield "--vendor", "not together with --paper, which has constants of its own"
        if self.paper and self.method != "milp":
            yield "--method", "not together with --paper, which has a method of its own"
        if self.policy is not None and (self.paper or self.method != "milp"):
            yield "--policy", "is predicted as it is; leave out --paper and --method"
        if self.schedule is not None:
            if self.paper or self.method != "milp":
                yield "--schedule", "is chosen by --paper and by --method; leave these out"
            yield from (("--schedule", message) for message in unknown_schedule(self.schedule))


Work = Literal["decode", "prefill", "mean"]
"""What simulated passes may have to do. decode: every pass is a full batch that decodes. prefill:
its prompts come first, in one pass. mean: every pass is the mean pass of the job, in which prompts
mix with answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimOptions(Options):
    """How `moebatch simulate` has the passes of a policy run."""

    compare: Annotated[str, Option("More schedules, such as multi,hot.")] = ""
    work: Annotated[Work, Option("What the passes compute.")] = "decode"
    passes: Annotated[int, Option("Passes to simulate.", min=1, max=1000)] = 3
    skew: Annotated[float, Option("Popularity of experts: rank**-SKEW.", min=0, max=10)] = 0.0
    seed: Annotated[int, Option("Seed of the routing.", min=0, max=2**63)] = 0
    num_hot: Annotated[
        int | None, Option("Experts loaded ahead of their gates.", min=0, max=65536)
    ] = None
    slots: Annotated[
        int | None, Option("Slots of experts instead of the policy's.", min=2, max=65536)
    ] = None
    schedule: str | None = None
    """None is the policy's own."""
    routing: "Routing | None" = None
    """Instead of a skew."""
    table: "Mapping[Kind, float]" = field(default_factory=dict)
    """Seconds that are given by kinds of tasks."""

    command: str = "moebatch simulate"

    @property
    def compared(self) -> list[str]:
        """Names of ``--compare``."""
        return [name.strip() for name in self.compare.split(",") if name.strip()]

    def schedules(self, own: str) -> list[str]:
        """Those to be simulated, each once, the policy's own if no other is asked for."""
        return list(dict.fromkeys((self.schedule or own, *self.compared)))

    def contradictions(self) -> Iterator[tuple[str, str]]:
        from moebatch.schedule.registry import unknown_schedule

        for name in self.compared:
            yield from (("--compare", message) for message in unknown_schedule(name))
