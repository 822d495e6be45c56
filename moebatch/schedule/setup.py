"""What a schedule knows before the first pass: the model's layers, and where things live."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from moebatch.schedule.lanes import STAGING, Lane
from moebatch.schedule.request import Sweep
from moebatch.schedule.steps.kv_route import Place, route
from moebatch.schedule.task import Kind
from moebatch.spec.machine.hardware import LevelName

NUM_LAYER_PLACES = 3
"""For weights outside experts that come up layer by layer: of two layers that may be in work, and
of the next one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A model under a policy, as far as the order of tasks depends on it."""

    num_layers: int
    """L."""
    num_experts: int
    """E, of a layer."""
    moe_layers: frozenset[int]
    """Layers that have experts; the others have one dense MLP."""
    num_hot: int
    """K: experts of a layer that come before its gates have chosen."""
    depth: int = 1
    """Steps ahead for which experts are prefetched."""
    window: int = 0
    """Steps ahead for which experts come from disk to main memory where they are computed above it;
    0 where none live on disk."""
    lanes: tuple[Lane, ...] = ()
    """Those that there are, as far as anything is run on them."""
    kv_homes: tuple[LevelName, ...] = ()
    """Where keys and values of each layer live; empty where all are where attention is."""
    streamed: tuple[int, ...] = ()
    """Layers whose weights outside experts come up for each pass, in their order."""
    compute: Place = "dram"
    """Where experts are computed: ``vram`` with a GPU."""
    most_together: int = 1
    """Experts that are computed in one task, once over all micro-batches."""
    activation_level: int = 0
    """N of Pre-gated MoE: gates choose for so many layers with experts ahead; 0 where every one
    chooses for its own."""
    num_encoding: int = 0
    """Layers that are for tokens of prompts alone, the first ones."""
    num_skipped: int = 0
    """Layers that a pass leaves out, the first ones."""

    def in_pass(self, sweep: Sweep) -> "Setup":
        """The same as a pass sees it that leaves out layers which none of its tokens goes
        through."""
        leaves_out = self.num_encoding and not sweep.encodes
        return replace(self, num_skipped=self.num_encoding) if leaves_out else self

    @property
    def has_staging(self) -> bool:
        """Whether weights are copied into pinned buffers on their way up."""
        return STAGING in self.lanes

    def layer(self, step: int) -> int:
        return step % self.num_layers

    def steps(self, first: int) -> range:
        """Steps of a walk through the model, but for layers that it leaves out."""
        return range(first + self.num_skipped, first + self.num_layers)

    def after(self, step: int) -> int:
        """The next step; behind the last one of a walk that of the next walk, which leaves out the
        same layers."""
        later = step + 1
        return later if self.layer(later) else later + self.num_skipped

    def is_moe(self, step: int) -> bool:
        """Whether the layer of a step has experts."""
        return self.layer(step) in self.moe_layers

    def kv_kinds(self, sweep: Sweep, step: int, micro_batch: int) -> Collection[Kind]:
        """Transfers that the keys and values of a micro-batch take in the layer of a step."""
        if not self.kv_homes or self.layer(step) < self.num_encoding:  # which keeps none
            return ()
        place: Place = "dram" if sweep.attends_on_cpu(micro_batch) else self.compute
        return route(self.kv_homes[self.layer(step)], place, self.compute).keys()

    def next_moe(self, step: int, count: int) -> list[int]:
        """The next steps with experts after `step`, as many as asked for, the first of the walk
        after it included, the step's own layer left out. That walk leaves out the same layers."""
        following = (step + distance for distance in range(1, self.num_layers))
        return [
            later
            for later in following
            if self.is_moe(later) and self.layer(later) >= self.num_skipped
        ][:count]

    def selected_by(self, step: int) -> int | None:
        """The later step of the same walk for which the gates of `step` choose; None if they only
        choose for their own."""
        layer = self.layer(step)
        later = chosen_ahead(self.moe_layers, self.activation_level).get(layer)
        return None if later is None else step - layer + later


def chosen_ahead(moe_layers: Collection[int], activation_level: int) -> Mapping[int, int]:
    """By layer, the later one for which its pre-gate chooses (Pre-gated MoE, section 3).

    Of B layers with experts and activation level N, those are the first B - N; the first N have
    gates of their own for themselves. Empty at level 0, where every gate chooses for its own layer.
    """
    blocks = sorted(moe_layers)
    later = blocks[activation_level:] if activation_level else []
    return dict(zip(blocks, later, strict=False))
