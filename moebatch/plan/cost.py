"""Seconds that each lane is busy during a pass: the corrected form of MoE-Lightning's model.

MoE-Lightning (section 4) counts attention and expert FFN of decoding sequences. Added here: the
other of attention's two products, projections, routers, shared experts and the head; only those
experts that some token chooses; prompt slices beside decoding sequences; hidden states and new
keys and values on their way between levels; the copy into pinned buffers; and the disk.
"""

from dataclasses import dataclass
from math import ceil

from moebatch.plan.footprint import FLOAT_BYTES, Dtypes
from moebatch.plan.lanes import BLOCK_SCHEDULES, LANES
from moebatch.plan.load import PassLoad
from moebatch.plan.scratch import MAX_GEMM_ROWS, PROMPT_ROWS, mean_bucket_rows
from moebatch.spec.hardware import Dtype, Hardware, LinkName, Processor
from moebatch.spec.policy import Policy
from moebatch.spec.shape import ModelShape

GPU_PROMPT_ROWS = 2048
"""Prompt tokens that a GPU takes through attention and experts at a time."""


def elementwise_bytes(shape: ModelShape, dtype_bytes: int) -> int:
    """Bytes that norms, routing and combining move per token and layer: eight hidden states,
    and two for each choice of an expert (its input gathered, its output put in place)."""
    return (8 + 2 * shape.experts_per_token) * shape.hidden_size * dtype_bytes


def distinct_experts(shape: ModelShape, tokens: float) -> float:
    """Experts of a layer that at least one of so many tokens chooses, routing being even:
    E(1 - (1 - k/E)^b)."""
    if tokens <= 0:
        return 0.0
    share = shape.experts_per_token / shape.num_experts
    return shape.num_experts * float(1 - (1 - share) ** tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Prices passes of one model on one machine."""

    shape: ModelShape
    dtypes: Dtypes
    hardware: Hardware

    def lanes(self, load: PassLoad, policy: Policy) -> dict[str, float]:
        """Busy seconds of every lane during a pass under `policy`."""
        seconds = dict.fromkeys(LANES, 0.0)
        for lane, time_s in (*self._compute(load, policy), *self._transfers(load, policy)):
            seconds[lane] += time_s
        return {lane: time_s for lane, time_s in seconds.items() if time_s > 0}

    def gemm_s(self, processor: Processor, rows: float, params: int) -> float:
        """Seconds of a matrix product of so many rows with weights of so many numbers."""
        return self._gemm_s(processor, rows, params, min(rows, MAX_GEMM_ROWS))

    def decode_attention_s(self, load: PassLoad, processor: Processor) -> float:
        """Seconds of the attention of decoding sequences in one layer, projections left out."""
        return self._decode_attention_s(load, processor) / self.shape.num_layers

    # --- arithmetic -----------------------------------------------------------------------------

    def _compute(self, load: PassLoad, policy: Policy) -> list[tuple[str, float]]:
        """Lane and seconds of each kind of arithmetic.

        A machine without a GPU does everything on its CPU. One with a GPU leaves to the CPU, as
        the policy says, the attention of decoding sequences (A_g = 0) and the experts (F_g = 0).
        """
        cpu = self.hardware.dram.processor
        gpu = self.hardware.vram.processor if self.hardware.vram else None
        assert cpu is not None, "main memory has a processor"
        main = ("gpu", gpu) if gpu else ("cpu", cpu)
        decode = main if policy.attention_on_gpu or not gpu else ("cpu", cpu)
        experts = main if policy.ffn_on_gpu or not gpu else ("cpu", cpu)
        return [
            (main[0], self._dense_s(load, policy, main[1])),
            (decode[0], self._decode_attention_s(load, decode[1])),
            (main[0], self._prompt_attention_s(load, main[1])),
            (experts[0], self._experts_s(load, policy, experts)),
        ]

    def _dense_s(self, load: PassLoad, policy: Policy, processor: Processor) -> float:
        """Projections, routers, shared experts, dense MLPs, norms and the head."""
        shape, tokens = self.shape, load.tokens
        dense_params = shape.resident_params - shape.embedding_params
        kinds = (
            (load.decode_sequences, policy.micro_batch_size),
            (load.prompt_tokens, PROMPT_ROWS),
        )
        layers_s = sum(
            self._gemm_s(processor, rows, dense_params, min(rows, at_once))
            for rows, at_once in kinds
        )
        moved = tokens * shape.num_layers * elementwise_bytes(shape, self._dtype_bytes)
        head_params = shape.vocab_size * shape.hidden_size
        head_s = self._gemm_s(processor, load.logits_rows, head_params, load.logits_rows)
        moved += load.logits_rows * shape.vocab_size * FLOAT_BYTES
        return layers_s + head_s + moved / processor.elementwise_bandwidth

    def _decode_attention_s(self, load: PassLoad, processor: Processor) -> float:
        positions = load.decode_positions * self._share_in_window(load)
        read = positions * self._kv_bytes_per_token
        flops = positions * self.shape.decode_flops_per_pair * self.shape.num_layers
        fixed = load.decode_sequences * self.shape.num_layers * processor.sequence_s
        return fixed + max(read / processor.attention_bandwidth, flops / processor.attention_flops)

    def _share_in_window(self, load: PassLoad) -> float:
        """Share of the positions of decoding sequences that layers with sliding windows see."""
        if not load.decode_sequences:
            return 1.0
        context = load.decode_positions / load.decode_sequences
        windows = self.shape.sliding_windows
        seen = (context if window is None else min(context, window) for window in windows)
        return sum(seen) / (len(windows) * context) if context else 1.0

    def _prompt_attention_s(self, load: PassLoad, processor: Processor) -> float:
        flops = load.prompt_pairs * self.shape.attention_flops_per_pair * self.shape.num_layers
        read = load.prompt_context * self._kv_bytes_per_token
        return flops / processor.attention_flops + read / processor.attention_bandwidth

    def _experts_s(self, load: PassLoad, policy: Policy, where: tuple[str, Processor]) -> float:
        """Once over all tokens of the pass; or, in schedules that go micro-batch by micro-batch,
        once for each, with the weights read from the level's memory every time."""
        lane, processor = where
        if lane == "cpu":
            fresh = policy.weights.disk
            arrived_s = self._expert_layers_s(load.tokens, processor, padded=True, streamed=True)
            stayed_s = self._expert_layers_s(load.tokens, processor, padded=True)
            # Where noise says that arriving helps, it does not.
            return fresh * max(arrived_s, stayed_s) + (1 - fresh) * stayed_s
        if policy.schedule == "klotski":
            return self._expert_layers_s(load.tokens, processor)
        total, decodes = 0.0, load.decode_sequences
        if decodes:
            size = min(policy.micro_batch_size, decodes)
            total += decodes / size * self._expert_layers_s(size, processor)
        if load.prompt_tokens:
            size = min(self.prompt_rows(policy), load.prompt_tokens)
            total += load.prompt_tokens / size * self._expert_layers_s(size, processor)
        return total

    @staticmethod
    def prompt_rows(policy: Policy) -> int:
        """Prompt tokens that go through a GPU's experts together."""
        return max(GPU_PROMPT_ROWS, policy.micro_batch_size)

    def _expert_layers_s(
        self,
        tokens: float,
        processor: Processor,
        *,
        padded: bool = False,
        streamed: bool = False,
    ) -> float:
        """All experts once. Row counts are `padded` to those in use on a CPU; experts have been
        `streamed` from the level below, or lie there."""
        shape = self.shape
        active = distinct_experts(shape, tokens)
        if not active:
            return 0.0
        rows = tokens * shape.experts_per_token / active
        rows = mean_bucket_rows(rows) if padded else rows
        at_once = min(rows, MAX_GEMM_ROWS)
        each_s = self._gemm_s(processor, rows, shape.expert_params, at_once, streamed=streamed)
        return len(shape.moe_layers) * active * each_s

    def _gemm_s(
        self,
        processor: Processor,
        rows: float,
        params: int,
        rows_at_once: float,
        *,
        streamed: bool = False,
    ) -> float:
        """Eq 14: the slower of arithmetic and reading the weights from the level's memory."""
        if rows <= 0:
            return 0.0
        rate = processor.gemm_for(self._dtype, streamed=streamed).at(max(1.0, rows_at_once))
        num_reads = ceil(rows / rows_at_once)
        read_s = num_reads * params * self._dtype_bytes / processor.bandwidth
        return max(2 * rows * params / rate, read_s)

    # --- links ----------------------------------------------------------------------------------

    def _transfers(self, load: PassLoad, policy: Policy) -> list[tuple[str, float]]:
        return [
            *self._weights_s(load, policy),
            *(self._kv_on_gpu_s(load, policy) if policy.attention_on_gpu else ()),
            *(self._kv_on_cpu_s(load, policy) if not policy.attention_on_gpu else ()),
            *self._hidden_s(load, policy),
        ]

    def _weights_s(self, load: PassLoad, policy: Policy) -> list[tuple[str, float]]:
        """Experts that some token chooses and that do not live where they are computed."""
        shape, weights = self.shape, policy.weights
        active = distinct_experts(shape, load.tokens) * len(shape.moe_layers)
        moved = active * self.dtypes.expert_bytes(shape)
        lanes = [("disk->dram", self._link_s("disk->dram", weights.disk * moved))]
        if not policy.ffn_on_gpu:
            return lanes
        upload = self._upload_s((1 - weights.vram) * moved)
        if policy.schedule in BLOCK_SCHEDULES:
            # A stream of its own, in which pinned buffers and the link take turns piece by piece.
            return [*lanes, ("weight block", max(time_s for _, time_s in upload))]
        return lanes + upload

    def _kv_on_gpu_s(self, load: PassLoad, policy: Policy) -> list[tuple[str, float]]:
        """Keys and values that live below come up and new ones go down (Eq 13, A_g = 1)."""
        below = 1 - policy.kv_cache.vram
        read = (load.decode_positions + load.prompt_context) * self._kv_bytes_per_token
        new = load.tokens * self._kv_bytes_per_token
        return [
            *self._upload_s(below * read, staged=False),
            ("vram->dram", self._link_s("vram->dram", below * new)),
            *self._kv_on_disk_s(read, new, policy.kv_cache.disk),
        ]

    def _kv_on_cpu_s(self, load: PassLoad, policy: Policy) -> list[tuple[str, float]]:
        """Decoding sequences attend where their cache is; prompt slices, on a GPU, bring theirs."""
        read = (load.decode_positions + load.prompt_context) * self._kv_bytes_per_token
        new = load.tokens * self._kv_bytes_per_token
        lanes = self._kv_on_disk_s(read, new, policy.kv_cache.disk)
        if not self.hardware.vram:
            return lanes
        context = load.prompt_context * self._kv_bytes_per_token
        queries = load.decode_sequences * self.shape.num_layers
        queries *= self.shape.query_width * self._dtype_bytes
        down = queries + new
        return [
            *lanes,
            *self._upload_s(queries + context, staged=False),
            ("vram->dram", self._link_s("vram->dram", down)),
        ]

    def _kv_on_disk_s(self, read: float, new: float, share: float) -> list[tuple[str, float]]:
        if not share:
            return []
        return [
            ("disk->dram", self._link_s("disk->dram", share * read)),
            ("dram->disk", self._link_s("dram->disk", share * new)),
        ]

    def _hidden_s(self, load: PassLoad, policy: Policy) -> list[tuple[str, float]]:
        """Hidden states that leave the GPU and come back: inputs and outputs of experts that a CPU
        computes (F_g = 0), and in every layer the prompts of a static batch, too many to stay."""
        if not self.hardware.vram:
            return []
        states = 0.0
        if not policy.ffn_on_gpu:
            states += load.tokens * len(self.shape.moe_layers)
        if policy.batching == "static":
            states += load.prompt_tokens * self.shape.num_layers
        moved = states * self.shape.hidden_size * self._dtype_bytes
        return [
            *self._upload_s(moved, staged=False),
            ("vram->dram", self._link_s("vram->dram", moved)),
        ]

    def _upload_s(self, num_bytes: float, *, staged: bool = True) -> list[tuple[str, float]]:
        """Weights are copied into pinned buffers first; caches and hidden states lie in such."""
        link = self.hardware.links["dram->vram"]
        lanes = [("dram->vram", num_bytes / link.bandwidth)]
        if staged and link.staging_bandwidth:
            lanes.append(("staging", num_bytes / link.staging_bandwidth))
        return lanes

    def _link_s(self, name: LinkName, num_bytes: float) -> float:
        if not num_bytes:
            return 0.0
        link = self.hardware.links.get(name)
        return num_bytes / link.bandwidth if link else float("inf")

    @property
    def _dtype(self) -> Dtype:
        return self.dtypes.compute

    @property
    def _dtype_bytes(self) -> int:
        return self.dtypes.compute_bytes

    @property
    def _kv_bytes_per_token(self) -> int:
        return self.shape.kv_bytes_per_token(self.dtypes.compute_bytes)
