"""Seconds in which links, and the copy into pinned buffers, are busy during a pass."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moebatch.layout.distinct_experts import distinct_experts
from moebatch.layout.load import PassLoad
from moebatch.layout.scratch import gpu_prompt_rows
from moebatch.plan.prices import Prices
from moebatch.schedule.registry import traits_of
from moebatch.spec.hardware import LinkName
from moebatch.spec.policy import Policy

LaneTime = tuple[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTransfers:
    """What moves between levels in one pass under one policy."""

    prices: Prices
    load: PassLoad
    policy: Policy
    num_loads: float | None = None
    """Experts that come to where they are computed; None counts those that some token chooses, if
    routing is even, and that do not live there."""

    @property
    def load_s(self) -> float:
        """Seconds until an expert has come from below, on all the way together."""
        one = replace(self, num_loads=1.0)
        return sum(seconds for _, seconds in one._weights())

    @property
    def weights_s(self) -> float:
        """Seconds in which the busiest lane brings experts."""
        return max(seconds for _, seconds in self._weights())

    def lanes(self) -> Iterator[LaneTime]:
        """Lane and seconds of each kind of transfer."""
        yield from self._weights()
        yield from self._kv_on_disk()
        if self.policy.attention_on_gpu:
            yield from self._kv_on_gpu()
        else:
            yield from self._kv_on_cpu()
        yield from self._hidden_states()

    # --- weights --------------------------------------------------------------------------------

    def _weights(self) -> Iterator[LaneTime]:
        """Experts that some token chooses and that do not live where they are computed."""
        weights, ffn_on_gpu = self.policy.weights, self.policy.ffn_on_gpu
        below = 1 - weights.vram if ffn_on_gpu else weights.disk
        num_loads = below * self._moved_experts() if self.num_loads is None else self.num_loads
        num_bytes = num_loads * self.prices.dtypes.expert_bytes(self.prices.shape)
        yield self._on("disk->dram", num_bytes * weights.disk / below if below else 0.0)
        if ffn_on_gpu:
            yield from self._weights_up(num_bytes)

    def _weights_up(self, num_bytes: float) -> Iterator[LaneTime]:
        """Weights are copied into pinned buffers first; caches and hidden states lie in such."""
        link_s = self.prices.link_s("dram->vram", num_bytes)
        staging_s = self.prices.staging_s(num_bytes, self.policy)
        if traits_of(self.policy).moves == "block":
            # A stream of its own, in which pinned buffers and the link take turns piece by piece.
            yield "weight block", max(link_s, staging_s)
        elif traits_of(self.policy).moves == "pages":
            yield "dram->vram", link_s
            yield "staging", staging_s
        else:
            # Chunks are copied into pinned buffers by whoever sends them up: the slower one counts.
            yield "dram->vram", max(link_s, staging_s)

    def _moved_experts(self) -> float:
        """Experts that a pass would move if none were where they are computed. Some schedules bring
        whole layers, chosen or not; `simple` does so again for each micro-batch."""
        shape, load, policy = self.prices.shape, self.load, self.policy
        layers = len(shape.moe_layers)
        if traits_of(policy).foresees != "layer":
            return distinct_experts(shape, load.tokens) * layers
        walks = load.decode_sequences / policy.micro_batch_size
        walks += load.prompt_tokens / gpu_prompt_rows(policy)
        num_walks = max(1.0, walks) if not traits_of(policy).shares_weights else 1.0
        return num_walks * shape.num_experts * layers

    # --- keys and values ------------------------------------------------------------------------

    def _kv_on_gpu(self) -> Iterator[LaneTime]:
        """Keys and values that live below come up and new ones go down (Eq 13, A_g = 1)."""
        below = 1 - self.policy.kv_cache.vram
        yield self._on("dram->vram", below * self._read_bytes)
        yield self._on("vram->dram", below * self._new_bytes)

    def _kv_on_cpu(self) -> Iterator[LaneTime]:
        """Decoding sequences attend where their cache is; prompt slices, on a GPU, bring theirs."""
        if not self.prices.hardware.vram:
            return
        load, layers = self.load, self.prices.shape.num_layers
        queries = layers * self.prices.query_bytes(load.decode_sequences)
        context = layers * self.prices.cache_bytes(load.prompt_context)
        yield self._on("dram->vram", queries + context)
        yield self._on("vram->dram", queries + self._new_bytes)

    def _kv_on_disk(self) -> Iterator[LaneTime]:
        share = self.policy.kv_cache.disk
        yield self._on("disk->dram", share * self._read_bytes)
        yield self._on("dram->disk", share * self._new_bytes)

    @property
    def _read_bytes(self) -> float:
        """Keys and values that attention reads, in all layers."""
        positions = self.load.decode_positions + self.load.prompt_context
        return self.prices.shape.num_layers * self.prices.cache_bytes(positions)

    @property
    def _new_bytes(self) -> float:
        """Keys and values that attention makes, in all layers."""
        return self.prices.shape.num_layers * self.prices.cache_bytes(self.load.tokens)

    # --- hidden states --------------------------------------------------------------------------

    def _hidden_states(self) -> Iterator[LaneTime]:
        """Hidden states that leave the GPU and come back: inputs and outputs of experts that a CPU
        computes (F_g = 0), and in every layer the prompts of a static batch, too many to stay."""
        if not self.prices.hardware.vram:
            return
        states, shape = 0.0, self.prices.shape
        if not self.policy.ffn_on_gpu:
            states += self.load.tokens * len(shape.moe_layers)
        if self.policy.batching == "static":
            states += self.load.prompt_tokens * shape.num_layers
        moved = self.prices.hidden_bytes(states)
        yield self._on("dram->vram", moved)
        yield self._on("vram->dram", moved)

    def _on(self, name: LinkName, num_bytes: float) -> LaneTime:
        return name, self.prices.link_s(name, num_bytes)
