"""Levels of memory from the disk up to the one that computes, and the lanes between them."""

from dataclasses import dataclass
from functools import cache

from moebatch.layout.fused import MOST_TOGETHER
from moebatch.schedule.lanes import BLOCK, LANES, STAGING, WRITE, Lane
from moebatch.schedule.registry import traits_of
from moebatch.schedule.steps.kv_route import Place
from moebatch.spec.machine.hardware import LEVELS, DeviceKind, Hardware, LevelName, LinkName
from moebatch.spec.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class Ladder:
    """The levels of a machine: experts are read at the bottom and computed at the top."""

    levels: tuple[LevelName, ...]
    """From the lowest one up; ``dram`` is always among them."""
    stages: bool = False
    """Whether pages of weights are copied into pinned buffers before they go up to ``vram``."""
    has_gpu: bool = False
    """Whether the top is a GPU and no stand-in, so that each launch has a price."""

    def __post_init__(self) -> None:
        order = tuple(level for level in reversed(LEVELS) if level in self.levels)
        assert self.levels == order, f"levels come from the lowest one up: {self.levels}"
        assert "dram" in self.levels, "every machine has main memory"

    @classmethod
    def of(cls, hardware: Hardware, *, stages: bool = False) -> "Ladder":
        """The levels of a machine. The processor of an emulated GPU is a CPU with its kernels."""
        found = tuple(level for level in reversed(LEVELS) if level in hardware.levels)
        gpu = hardware.vram.processor if hardware.vram else None
        has_gpu = gpu is not None and not gpu.instruction_set
        return cls(found, stages=stages, has_gpu=has_gpu)

    @property
    def top(self) -> Place:
        """The highest level: everything is computed there that a policy puts nowhere else."""
        return "vram" if "vram" in self.levels else "dram"

    def below(self, level: LevelName) -> LevelName | None:
        """The next lower level, from which a level is filled; None at the bottom."""
        place = self.levels.index(level)
        return self.levels[place - 1] if place else None

    def link_up(self, level: LevelName) -> LinkName | None:
        """The link over which a level is filled from below; None at the bottom."""
        links: dict[LevelName, LinkName] = {"dram": "disk->dram", "vram": "dram->vram"}
        return None if self.below(level) is None else links[level]

    def experts_at(self, policy: Policy) -> Place:
        """The level that computes experts."""
        return self.top if policy.ffn_on_gpu else "dram"

    def most_together(self, policy: Policy) -> int:
        """Experts that are computed in one task: a launch is for many of them on a GPU, and threads
        of a CPU are started and awaited once for all. There a third of the slots at most: the
        others take in what the disk reads meanwhile (Zen 4, two cores, 512 tokens over 32 experts
        of gpt-oss, six slots: 3 and 6 % faster by twos). An emulated GPU computes one by one."""
        if self.has_gpu or (self.top == "dram" and not policy.weights.disk):
            return MOST_TOGETHER
        return max(1, min(MOST_TOGETHER, policy.num_slots // 3)) if self.top == "dram" else 1

    def copies_through_buffers(self, policy: Policy) -> bool:
        """Whether weights are copied into pinned buffers on their way up: pages are where the
        machine does so, everything is under policies of systems that do."""
        return policy.staging or (self.stages and traits_of(policy).moves == "pages")

    def attends_at(self, policy: Policy) -> Place:
        """The level that computes the attention of sequences that decode."""
        return self.top if policy.attention_on_gpu else "dram"


def stages_pages(hardware: Hardware, kind: DeviceKind) -> bool:
    """Whether a device copies pages of weights into pinned buffers on their way up: an emulated
    GPU does, if its profile says how fast; a real one reads memory that is pinned as a whole."""
    return kind == "emulate" and hardware.has_staging


def lanes_of(ladder: Ladder, policy: Policy) -> tuple[Lane, ...]:
    """The lanes of a machine under a policy, processors first, then links from the top down.

    A lane that is listed may have nothing to do; one that is not listed is never used.
    """
    moves = traits_of(policy).moves
    return _lanes_there(
        ladder.levels,
        frozenset({ladder.top, ladder.experts_at(policy), ladder.attends_at(policy)}),
        has_block=moves == "block",
        has_staging=moves == "pages" and ladder.copies_through_buffers(policy),
        writes=policy.kv_cache.disk > 0,
    )


@cache  # plans ask thousands of times
def _lanes_there(
    levels: tuple[LevelName, ...],
    computing: frozenset[LevelName],
    *,
    has_block: bool,
    has_staging: bool,
    writes: bool,
) -> tuple[Lane, ...]:
    """Those between some levels, of which some compute, but for what a policy does without.
    Schedules launch reads of a disk, of nothing where there is none."""
    without = {
        lane
        for lane, is_there in ((BLOCK, has_block), (STAGING, has_staging), (WRITE, writes))
        if not is_there
    }
    return tuple(
        lane
        for lane in LANES
        if lane not in without
        and (lane.at in computing if lane.computes else {*lane.at.split("->")} <= {*levels, "disk"})
    )
