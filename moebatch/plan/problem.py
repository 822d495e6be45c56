"""What a planner is asked: this model, on this machine, for this workload."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil

import numpy as np

from moebatch.arrays import Ints
from moebatch.layout.buffers import MemoryUse
from moebatch.layout.division import Division
from moebatch.layout.footprint import Dtypes, Footprint
from moebatch.layout.habits import Habits
from moebatch.layout.ladder import Ladder
from moebatch.layout.load import PassLoad
from moebatch.layout.placed import PlacedModel
from moebatch.plan.pricing.cost import PassCost
from moebatch.plan.pricing.pass_tasks import Arithmetic
from moebatch.plan.pricing.prices import Prices
from moebatch.schedule.setup import NUM_LAYER_PLACES
from moebatch.spec.machine.hardware import Hardware, Level, LevelName, Link, LinkName
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.policy.policy import PAGE_TOKENS, Placement, Policy, pages_of
from moebatch.spec.workload import Workload

GIB = 2**30
_PROGRAM_BYTES: Mapping[LevelName, int] = {"dram": 5 * GIB // 16}
"""Interpreter, torch and the rest of the program, measured on a machine without a GPU."""
PROGRAM_BYTES_WITH_GPU: Mapping[LevelName, int] = {"dram": 2 * GIB, "vram": GIB // 2}
"""The same with CUDA: libraries on the host, context and workspaces on the device. Estimates."""
_RISKED_TOKENS = (32_768, 131_072)
"""Of a pass on any machine, and on one that is fast enough."""
_RISKED_S = 5.0
"""Of arithmetic at the highest rate; a pass takes some times as long."""


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from them is worked out once
class Problem:
    """Everything that decides over a policy. Budgets are the capacities of the hardware."""

    shape: ModelShape
    dtypes: Dtypes
    hardware: Hardware
    workload: Workload
    program_bytes: Mapping[LevelName, int] = field(default_factory=dict)
    """What the process holds before any weight; empty is what is usual."""
    kv_on_disk: bool = True
    """Whether keys and values may live on disk."""
    kv_beside_weights: bool = True
    """Whether that is the disk of the weights, whose rates are known; on another one they live only
    where there is no room for them elsewhere."""
    stages: bool = False
    """Whether pages of weights are copied into pinned buffers on their way up."""
    schedule: str | None = None
    """The schedule that policies are for; None leaves it to the search."""
    streamed_layers: int = 0
    """Layers whose weights outside experts come up from the level below, in policies that a search
    begins with."""
    habits: Habits | None = None
    """What is known of the model's routing."""
    instruction_set: str | None = None
    """That of the kernels that run on the CPU, empty where none do; None is as the hardware says.
    They decide over the memory that products take."""
    has_gpu_kernels: bool | None = None
    """Whether those in Triton run on the GPU; None is as the hardware says."""

    @cached_property
    def prices(self) -> Prices:
        """Prices of the pieces of a pass."""
        return Prices(
            shape=self.shape,
            dtypes=self.dtypes,
            hardware=self.hardware,
            ladder=self.ladder,
            has_gpu_kernels=self.has_gpu_kernels,
        )

    def cost_of(self, load: PassLoad, policy: Policy, known: Arithmetic | None = None) -> PassCost:
        """What a pass costs under `policy`. `known` remembers what many passes share."""
        known = {} if known is None else known
        return PassCost(
            prices=self.prices, load=load, policy=policy, known=known, habits=self.habits
        )

    @cached_property
    def most_worth_risking(self) -> int:
        """Tokens of a pass, of which all that is done is lost when a run is killed: more of them
        where they are computed in seconds."""
        shape, processor = self.shape, self.hardware.levels[self.ladder.top].processor
        assert processor is not None, "the highest level computes"
        chosen = len(shape.moe_layers) * shape.computed_per_token * shape.expert_params
        of_token = 2 * (shape.resident_params - shape.embedding_params + chosen)
        in_seconds = _RISKED_S * processor.gemm_for(self.dtypes.compute).peak / of_token
        fewest, most = _RISKED_TOKENS
        return min(max(fewest, int(in_seconds)), most)

    @property
    def as_cached(self) -> "Problem":
        """The same problem with a model that has what sequences of these lengths have need of, and
        the work as the cache of that model holds it."""
        shape = self.shape.attending_within(self.workload.max_total_tokens)
        return replace(self, shape=shape, workload=shape.cached(self.workload))

    @property
    def evenly(self) -> "Problem":
        """The same problem, with routing taken to be even and foreseen: as it is wherever a pass
        needs all experts anyway."""
        return replace(self, habits=None)

    @cached_property
    def num_experts(self) -> int:
        """Experts of all layers together."""
        return len(self.shape.moe_layers) * self.shape.num_experts

    def placed(self, policy: Policy) -> PlacedModel:
        """The model under a policy, on the levels of the machine."""
        return PlacedModel(self.shape, policy, self.ladder)

    def num_resident(self, policy: Policy) -> int:
        """Experts that stay where they are computed."""
        return round(policy.weights.on(self.ladder.experts_at(policy)) * self.num_experts)

    def with_residents(self, policy: Policy, num_resident: float) -> Policy:
        """The policy with so many experts where they are computed, all at the most; the others
        are on the level below, but for those on disk under a GPU, which stay there."""
        share = min(1.0, num_resident / self.num_experts)
        if self.ladder.experts_at(policy) == "dram":
            return replace(policy, weights=Placement(dram=share, disk=1 - share))
        disk = min(policy.weights.disk, 1 - share)
        return replace(policy, weights=Placement(vram=share, dram=1 - share - disk, disk=disk))

    @property
    def fewest_pages(self) -> int:
        """Pages of keys and values of the longest sequence: with fewer it can never run."""
        return pages_of(self.workload.max_cached_tokens)

    def most_pages(self, batch_size: int) -> int:
        """Pages of keys and values that so many sequences can use: those that the longest ones hold
        in the end, all at once. A sample is taken to miss a longest one."""
        longest, total = self.fewest_pages, self.workload.num_sequences
        all_longest = batch_size * longest
        if total is None or not self.workload.lengths:
            return all_longest
        pages_S = self._longest_pages_S
        together = min(batch_size, total)
        num_sampled = ceil(together * len(pages_S) / total)
        held = int(pages_S[:num_sampled].sum()) * together / num_sampled
        return min(all_longest, ceil(held) + longest)

    @cached_property
    def _longest_pages_S(self) -> Ints:
        """Pages of the sequences of the sample, the longest first."""
        prompts_S, new_S, shared_S = np.array(self.workload.lengths, np.int64).T
        cached_S = np.minimum(prompts_S - shared_S + new_S, self.workload.most_cached)
        pages_S: Ints = np.sort(-(-cached_S // PAGE_TOKENS))[::-1]
        return pages_S

    @cached_property
    def ladder(self) -> Ladder:
        """The levels of the machine."""
        return Ladder.of(self.hardware, stages=self.stages)

    @property
    def with_vram(self) -> bool:
        """Whether the machine has a GPU."""
        return self.hardware.vram is not None

    def footprints(
        self, policy: Policy, division: Division | None = None
    ) -> dict[LevelName, Footprint]:
        """What `policy` takes of every level of the machine; with whole experts and layers, unless
        `division` says otherwise."""
        of_levels = self.memory.footprints(policy, division)
        return {level: of_levels[level] for level in self.hardware.levels}

    @cached_property
    def memory(self) -> MemoryUse:
        """What is held whatever the policy, and the buffers of policies."""
        usual = PROGRAM_BYTES_WITH_GPU if self.with_vram else _PROGRAM_BYTES
        cpu = self.hardware.dram.processor
        planned = cpu.instruction_set if cpu else ""
        return MemoryUse(
            shape=self.shape,
            dtypes=self.dtypes,
            workload=self.workload,
            program_bytes=self.program_bytes or usual,
            ladder=self.ladder,
            instruction_set=planned if self.instruction_set is None else self.instruction_set,
        )

    def capacity_bytes(self, level: LevelName) -> int:
        """What the job may take of a level."""
        return self.hardware.levels[level].capacity_bytes

    def overfull(self, policy: Policy) -> dict[LevelName, Footprint]:
        """What `policy` takes of those levels that are too small for it."""
        return {
            level: footprint
            for level, footprint in self.footprints(policy).items()
            if footprint.total_bytes > self.capacity_bytes(level)
        }

    def fits(self, policy: Policy) -> bool:
        """Whether every level has room for `policy`."""
        return not self.overfull(policy)

    @property
    def most_streamed_layers(self) -> int:
        """Layers whose weights outside experts may come up in each pass: as many as take their
        places in turns, whole rounds of them; none behind an encoder, whose layers a pass may
        leave out, and where nothing is below."""
        is_above = self.ladder.top == "vram" or self.keeps_kv_on_disk
        if self.shape.encoder is not None or not is_above:
            return 0
        return self.shape.num_layers // NUM_LAYER_PLACES * NUM_LAYER_PLACES

    @property
    def has_disk(self) -> bool:
        """Whether experts can be read from disk."""
        return self.hardware.disk is not None and "disk->dram" in self.hardware.links

    @property
    def keeps_kv_on_disk(self) -> bool:
        """Whether keys and values may live on disk, and can be written and read there."""
        return self.kv_on_disk and self.has_disk and "dram->disk" in self.hardware.links

    def with_link_rate(self, name: LinkName, bandwidth: float) -> "Problem":
        """The same problem with another rate of a link that is there."""
        return self.with_link(replace(self.hardware.links[name], bandwidth=bandwidth))

    def with_capacity(self, level: LevelName, num_bytes: int) -> "Problem":
        """The same problem with another budget."""
        return self.with_level(replace(self.hardware.levels[level], capacity_bytes=num_bytes))

    def with_link(self, link: Link) -> "Problem":
        """The same problem with other figures of a link that is there."""
        links = {**self.hardware.links, link.name: link}
        return replace(self, hardware=replace(self.hardware, links=links))

    def with_level(self, level: Level) -> "Problem":
        """The same problem with other figures of a level that is there."""
        levels = {**self.hardware.levels, level.name: level}
        return replace(self, hardware=replace(self.hardware, levels=levels))
