"""How far a run is, and what came of it: figures only, drawn elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moebatch.folder.shard import Shard
from moebatch.plan.as_json import policy_json, prediction_json
from moebatch.plan.prediction import Prediction
from moebatch.schedule.foresight import LayerForesight
from moebatch.schedule.timeline.statistics import Statistics
from moebatch.spec.policy import Policy

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
    """A moment of a run."""

    phase: Phase
    run_folder: str
    """Where finished rows are kept until the output is whole."""
    num_rows: int
    num_done: int
    """Rows with a line in the output, failed ones among them."""
    num_failed: int
    num_ended: int
    """Rows that ended in this run."""
    num_running: int
    """Sequences in work."""
    num_passes: int
    """Passes that are done."""
    layer: int
    """Layers that the pass in work has behind it."""
    num_layers: int
    prompt_tokens: int
    generated_tokens: int
    expected_tokens: int
    """New tokens of the whole job, when every answer is as long as it may be."""
    elapsed_s: float
    """Since the first pass began."""
    eta_s: float | None
    """Of the passes that are left, at the rate of those so far; None before there is a plan."""
    memory_bytes: int
    budget_bytes: int
    lanes: tuple[LaneTime, ...]
    is_emulated: bool = False
    """Whether a GPU is only emulated."""
    foresight: Mapping[int, LayerForesight] = field(default_factory=dict)
    """By layer, how well experts were foreseen; empty where all of them have stayed."""

    @property
    def fraction(self) -> float:
        """Part of the job that is done, 0..1: by rows, and by tokens while rows are in work."""
        if self.num_done >= self.num_rows:
            return 1.0
        by_tokens = self.generated_tokens / max(1, self.expected_tokens)
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
class RunSummary:
    """What a finished run leaves to say."""

    output: str
    shard: Shard
    """Of several, none writes the output: that is left to the merge."""
    num_rows: int
    num_failed: int
    num_ended: int
    """Rows that ended in this run; the others were done before."""
    errors: dict[str, int]
    """Failed rows by the code of their error."""
    prompt_tokens: int
    generated_tokens: int
    load_s: float
    run_s: float
    """From the first pass to the last."""
    total_s: float
    lanes: tuple[LaneTime, ...]
    """Those that did something."""
    waited_s: float
    """Time in which compute waited for experts."""
    bytes_read: int
    num_passes: int
    num_preempted: int
    num_shrunk: int
    """Times that passes were made smaller because the system refused memory."""
    peak_bytes: int
    """Most physical memory of the process, by the kernel's count."""
    budget_bytes: int
    policy: Policy | None
    """None if no row could be computed."""
    num_copied: int = 0
    """Rows that got the answer of another one."""
    shared_tokens: int = 0
    """Prompt tokens that had been computed for other rows."""
    num_grown: int = 0
    """Experts that came to stay in the end, in memory that the cache had given back."""
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
    foresight: Mapping[int, LayerForesight] = field(default_factory=dict)
    """By layer, how well experts were foreseen; empty where all of them have stayed."""
    torch_only: str | None = None
    """Why there were no compiled kernels; None if there were."""
    products: str = ""
    """What the CPU multiplied, by which instruction set, and how fast it is known to be."""

    @property
    def has_output(self) -> bool:
        """Whether the output was written."""
        return self.shard.is_all

    def as_json(self) -> dict[str, Any]:
        """Plain data, as `moebatch run --json` prints it."""
        foreseen = {"prediction": self.prediction, "hindsight": self.hindsight}
        return {
            "output": self.output,
            "has_output": self.has_output,
            "shard": str(self.shard),
            "rows": self.num_rows,
            "failed": self.num_failed,
            "errors": self.errors,
            "products": self.products,
            "ended_now": self.num_ended,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "load_s": self.load_s,
            "run_s": self.run_s,
            "total_s": self.total_s,
            "passes": self.num_passes,
            "busy_s": {lane.name: lane.busy_s for lane in self.lanes},
            "bytes_read": self.bytes_read,
            "peak_bytes": self.peak_bytes,
            "vram_peak_bytes": self.vram_peak_bytes,
            "budget_bytes": self.budget_bytes,
            "emulated": self.emulated,
            "policy": self.policy and policy_json(self.policy),
            **{name: one and prediction_json(one) for name, one in foreseen.items()},
        }
