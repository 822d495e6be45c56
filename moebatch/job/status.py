"""How far a run is, and what came of it: figures of lanes, rows and tokens, drawn elsewhere."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from moebatch.engine.statistics import EngineStatistics
from moebatch.errors import ExitCode
from moebatch.folder.shard import Shard
from moebatch.plan.as_json import policy_json, prediction_json
from moebatch.plan.prediction import Prediction
from moebatch.schedule.drivers.foresight import LayerForesight
from moebatch.schedule.lanes import CPU, GPU, PROCESSORS, READ, WRITE, lane_of_row
from moebatch.schedule.steps.kv_route import TO_ATTENTION
from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.statistics import Statistics, in_order
from moebatch.schedule.timeline.timeline import LAUNCH
from moebatch.spec.policy.policy import Policy

if TYPE_CHECKING:  # `moebatch status` need not load torch
    from moebatch.engine.build import BuiltEngine

Phase = Literal["checking input", "loading weights", "running", "writing answers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneTime:
    """What one lane did during a run, or during a part of it."""

    name: str
    busy_s: float
    elapsed_s: float
    between_s: float = 0.0
    """Of the busy time, what went into things that are no tasks of the schedule: choosing tokens,
    gathering the next batch, and so on."""

    @property
    def share(self) -> float:
        """Part of the time in which the lane was busy, 0..1."""
        return min(1.0, self.busy_s / self.elapsed_s) if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A moment of a run; what is not known yet is 0, None or empty."""

    phase: Phase = "checking input"
    num_rows: int = 0
    num_done: int = 0
    """Rows that have ended, failed ones among them, in earlier runs too."""
    num_ended: int = 0
    """Rows that ended in this run."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Failed rows by the code of their error."""
    num_cut_off: int = 0
    """Rows that ended in this run with an answer cut off by its limit of tokens."""
    num_cut_thinking: int = 0
    """Those of them in which the model still thought, so that the answer is empty."""
    engine: EngineStatistics = field(default_factory=EngineStatistics)
    """As it was at that moment."""
    expected_tokens: int = 0
    """New tokens of the whole job, when every answer is as long as it may be."""
    elapsed_s: float = 0.0
    """Since the first pass began, and up to the last."""
    eta_s: float | None = None
    """Of the passes that are left, at the rate of those so far; None before there is a plan."""
    memory_bytes: int = 0
    budget_bytes: int
    lanes: tuple[LaneTime, ...] = ()
    """Those that did something."""
    is_emulated: bool = False
    """Whether a GPU is only emulated."""
    foresight: Mapping[int, LayerForesight] = field(default_factory=dict)
    """By layer, how well experts were foreseen; empty where all of them have stayed."""

    @property
    def num_failed(self) -> int:
        """Rows with an error in the place of an answer."""
        return sum(self.errors.values())

    @property
    def fraction(self) -> float:
        """Part of the job that is done, 0..1: by rows, and by tokens while rows are in work."""
        if self.num_done >= self.num_rows:
            return 1.0
        by_tokens = self.engine.generated_tokens / max(1, self.expected_tokens)
        return max(self.num_done / self.num_rows, min(by_tokens, 0.99))


@dataclass(frozen=True, kw_only=True, slots=True)
class GatingUse:
    """How gates have departed from the model, and how far."""

    how: str
    single_share: float | None
    """Decisions for a single expert among all, 0..1; None where nothing may be left out."""
    mean_experts: float | None
    """Experts of a decision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary(RunStatus):
    """The last moment of a run, and what else it leaves to say."""

    output: str
    of_failed: str
    """The file with the errors of rows: the output, if they have none of their own."""
    shard: Shard
    """Of several, none writes the output: that is left to the merge."""
    load_s: float
    """Until the first pass."""
    total_s: float
    waited_s: Mapping[str, float]
    """Time in which compute waited, by what for: experts, or keys and values."""
    bytes_read: int
    peak_bytes: int
    """Most physical memory of the process, by the kernel's count."""
    policy: Policy | None
    """None if no row could be computed."""
    num_copied: int = 0
    """Rows that got the answer of another one."""
    num_begun_again: int = 0
    """Times that the run began again in less memory; what it counts besides rows, it counts from
    the last time on."""
    prediction: Prediction | None = None
    """What was expected of the policy before the first pass."""
    hindsight: Prediction | None = None
    """What would have been expected had the rate of the disk during the run and the lengths of the
    answers been known: disks drift and answers end early, and this tells that from errors of the
    cost model. None where nothing of the kind is known."""
    disk_rate: float | None = None
    """Bytes per second at which experts were read; None where too few were to tell."""
    mean_answer_tokens: float | None = None
    """New tokens of a sequence that was computed, where answers ended earlier than they might."""
    reads_past_page_cache: bool
    gating: GatingUse | None = None
    """None if it was exact."""
    emulated: str | None = None
    """The GPU that was emulated, and how; None if none was."""
    vram_peak_bytes: int | None = None
    """Most memory of the GPU that was in use; None without one."""
    waits: Statistics | None = None
    """What the lanes waited for; None if everything was done one after the other."""
    torch_only: str | None = None
    """Why there were no compiled kernels; None if there were."""
    products: str = ""
    """What the CPU multiplied, by which instruction set, and how fast it is known to be."""

    @property
    def exit_code(self) -> ExitCode:
        """With which the command ends."""
        return ExitCode.ROWS_FAILED if self.num_failed else ExitCode.OK

    @property
    def has_output(self) -> bool:
        """Whether the output was written."""
        return self.shard.is_all

    def as_json(self) -> dict[str, Any]:
        """Plain data, as `moebatch run --json` prints it."""
        foreseen = {"prediction": self.prediction, "hindsight": self.hindsight}
        return {
            "exit_code": int(self.exit_code),
            "output": self.output,
            "has_output": self.has_output,
            "shard": str(self.shard),
            "rows": self.num_rows,
            "failed": self.num_failed,
            "errors": dict(self.errors),
            "products": self.products,
            "ended_now": self.num_ended,
            "cut_off": self.num_cut_off,
            "cut_off_thinking": self.num_cut_thinking,
            "begun_again": self.num_begun_again,
            "prompt_tokens": self.engine.prompt_tokens,
            "generated_tokens": self.engine.generated_tokens,
            "load_s": self.load_s,
            "run_s": self.elapsed_s,
            "total_s": self.total_s,
            "passes": self.engine.num_passes,
            "busy_s": {lane.name: lane.busy_s for lane in self.lanes},
            "bytes_read": self.bytes_read,
            "peak_bytes": self.peak_bytes,
            "vram_peak_bytes": self.vram_peak_bytes,
            "budget_bytes": self.budget_bytes,
            "emulated": self.emulated,
            "policy": self.policy and policy_json(self.policy),
            **{name: one and prediction_json(one) for name, one in foreseen.items()},
        }


_COMING: Mapping[str, tuple[Kind, ...]] = {
    "experts": (Kind.CHUNK, Kind.FETCH, Kind.STAGE, Kind.PAGE, Kind.BLOCK),
    "weights outside experts": (Kind.LAYER_UP,),
    "keys and values": TO_ATTENTION,
}


def lane_times(built: "BuiltEngine", elapsed_s: float) -> tuple[LaneTime, ...]:
    """Busy seconds of every lane that has done something; the time of the disk is divided among
    what it reads and writes at once."""
    reads, between = built.reads, dict[str, float]()
    if built.recorder is None:
        busy = {CPU.name: max(0.0, elapsed_s - reads.waited_s), READ.name: reads.busy.total_s}
    else:
        lanes = built.recorder.statistics.lanes
        busy = {name: lanes[name].busy_s for name in list(lanes) if lane_of_row(name) != READ.name}
        if WRITE.name in busy:
            busy[WRITE.name] = built.writes.busy.total_s
        if _cpu_launches(busy):
            idle_s = list(lanes[CPU.name].idle_s.items())
            waits_s = sum(seconds for kind, seconds in idle_s if kind != LAUNCH)
            busy[CPU.name] = max(0.0, elapsed_s - waits_s)
            between[CPU.name] = max(0.0, busy[CPU.name] - lanes[CPU.name].busy_s)
        if reads.num_bytes:
            busy[READ.name] = reads.busy.total_s
    return tuple(
        LaneTime(
            name=name, busy_s=busy[name], elapsed_s=elapsed_s, between_s=between.get(name, 0.0)
        )
        for name in in_order(busy)
    )


def waited_s(built: "BuiltEngine") -> dict[str, float]:
    """Seconds in which what computes experts waited for them, and for keys and values."""
    if built.recorder is None:
        return {"experts": built.reads.waited_s}
    lanes = built.recorder.statistics.lanes
    main = next((lanes[name] for name in PROCESSORS if name in lanes), None)
    if main is None:
        return {}
    return {
        what: sum(main.idle_s.get(kind, 0.0) for kind in kinds) for what, kinds in _COMING.items()
    }


def shown_waits(statistics: Statistics) -> Statistics:
    """The same without reads of a disk, whose rows say little one by one, and without what
    `lane_times` takes for work."""
    shown = Statistics(
        num_layers=statistics.num_layers, since_s=statistics.since_s, until_s=statistics.until_s
    )
    for name, lane in list(statistics.lanes.items()):
        if lane_of_row(name) != READ.name:
            works = name == CPU.name and _cpu_launches(statistics.lanes)
            shown.lanes[name] = lane.apart_from(LAUNCH) if works else lane
    return shown


def _cpu_launches(lanes: Collection[str]) -> bool:
    """Whether the CPU's lane is that of the thread that launches: what it does between tasks is
    work, too."""
    return GPU.name not in lanes and CPU.name in lanes
