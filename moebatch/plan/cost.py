"""Seconds that each lane is busy during a pass: the corrected form of MoE-Lightning's model.

MoE-Lightning (section 4) counts attention and expert FFN of decoding sequences. Added here: the
other of attention's two products, projections, routers, shared experts and the head; only those
experts that some token chooses; prompt slices beside decoding sequences; hidden states and new
keys and values on their way between levels; the copy into pinned buffers; and the disk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

from moebatch.plan.footprint import FLOAT_BYTES, Dtypes
from moebatch.plan.lanes import (
    BLOCK_SCHEDULES,
    PASS_WIDE_SCHEDULES,
    WHOLE_LAYER_SCHEDULES,
)
from moebatch.plan.load import PassLoad
from moebatch.plan.scratch import MAX_GEMM_ROWS, PROMPT_ROWS, mean_bucket_rows
from moebatch.schedule.lanes import LANES
from moebatch.schedule.names import PAGED
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

    # --- pieces, also for single tasks of a pass ------------------------------------------------

    def gemm_s(self, processor: Processor, rows: float, params: int) -> float:
        """Seconds of a matrix product of so many rows with weights of so many numbers."""
        return self._gemm_s(processor, rows, params, min(rows, MAX_GEMM_ROWS))

    def dense_gemm_s(
        self, processor: Processor, load: PassLoad, params: int, micro_batch_size: int
    ) -> float:
        """Seconds in which all tokens go through weights of so many numbers outside the experts,
        micro-batch by micro-batch."""
        kinds = ((load.decode_sequences, micro_batch_size), (load.prompt_tokens, PROMPT_ROWS))
        return sum(
            self._gemm_s(processor, rows, params, min(rows, at_once)) for rows, at_once in kinds
        )

    def moving_s(self, processor: Processor, hidden_states: float) -> float:
        """Seconds in which norms, routing and combining read or write so many hidden states."""
        moved = hidden_states * self.shape.hidden_size * self._dtype_bytes
        return moved / processor.elementwise_bandwidth

    def head_s(self, processor: Processor, rows: float) -> float:
        """Seconds of the logits after so many tokens."""
        params = self.shape.vocab_size * self.shape.hidden_size
        moved = rows * self.shape.vocab_size * FLOAT_BYTES
        gemm_s = self._gemm_s(processor, rows, params, rows)
        return gemm_s + moved / processor.elementwise_bandwidth

    def decode_attention_s(self, load: PassLoad, processor: Processor) -> float:
        """Seconds of the attention of decoding sequences in one layer, projections left out."""
        return self._decode_attention_s(load, processor) / self.shape.num_layers

    def prompt_attention_s(self, load: PassLoad, processor: Processor) -> float:
        """Seconds of the attention among tokens of prompts in one layer."""
        return self._prompt_attention_s(load, processor) / self.shape.num_layers

    def expert_s(self, processor: Processor, rows: float) -> float:
        """Seconds of one expert on a GPU over so many tokens."""
        at_once = min(rows, MAX_GEMM_ROWS)
        return self._gemm_s(processor, rows, self.shape.expert_params, at_once)

    def cpu_expert_s(self, processor: Processor, rows: float, *, fresh: float) -> float:
        """Seconds of one expert on a CPU over so many rows, padding counted; with the chance
        `fresh` it has just arrived from the level below."""
        params, at_once = self.shape.expert_params, min(rows, MAX_GEMM_ROWS)
        arrived_s = self._gemm_s(processor, rows, params, at_once, streamed=True)
        stayed_s = self._gemm_s(processor, rows, params, at_once)
        # Where noise says that arriving helps, it does not.
        return fresh * max(arrived_s, stayed_s) + (1 - fresh) * stayed_s

    def link_s(self, name: LinkName, num_bytes: float) -> float:
        """Seconds of so many bytes on a link; infinite where the machine lacks it."""
        return self._link_s(name, num_bytes)

    def staging_s(self, num_bytes: float) -> float:
        """Seconds of the copy into pinned buffers; 0 where data lies ready."""
        link = self.hardware.links.get("dram->vram")
        rate = link.staging_bandwidth if link else None
        return num_bytes / rate if rate else 0.0

    def cache_bytes(self, positions: float) -> float:
        """Keys and values of so many positions in one layer."""
        return positions * self._kv_bytes_per_token / self.shape.num_layers

    def query_bytes(self, tokens: float) -> float:
        """Queries, or results of attention, of so many tokens in one layer."""
        return tokens * self.shape.query_width * self._dtype_bytes

    def hidden_bytes(self, tokens: float) -> float:
        """Hidden states of so many tokens."""
        return tokens * self.shape.hidden_size * self._dtype_bytes

    @property
    def main(self) -> Processor:
        """What computes everything that a policy does not leave to the CPU."""
        return (self.hardware.vram.processor if self.hardware.vram else None) or self.cpu

    @property
    def cpu(self) -> Processor:
        """The processor at main memory."""
        assert self.hardware.dram.processor is not None, "main memory has a processor"
        return self.hardware.dram.processor

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
        params = shape.resident_params - shape.embedding_params
        layers_s = self.dense_gemm_s(processor, load, params, policy.micro_batch_size)
        moved = tokens * shape.num_layers * elementwise_bytes(shape, self._dtype_bytes)
        moved_s = moved / processor.elementwise_bandwidth
        return layers_s + self.head_s(processor, load.logits_rows) + moved_s

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
            return self._expert_layers_s(
                load.tokens,
                lambda rows: self.cpu_expert_s(processor, mean_bucket_rows(rows), fresh=fresh),
            )
        each_s = partial(self.expert_s, processor)
        if policy.schedule in PASS_WIDE_SCHEDULES:
            return self._expert_layers_s(load.tokens, each_s)
        total, decodes = 0.0, load.decode_sequences
        if decodes:
            size = min(policy.micro_batch_size, decodes)
            total += decodes / size * self._expert_layers_s(size, each_s)
        if load.prompt_tokens:
            size = min(self.prompt_rows(policy), load.prompt_tokens)
            total += load.prompt_tokens / size * self._expert_layers_s(size, each_s)
        return total

    @staticmethod
    def prompt_rows(policy: Policy) -> int:
        """Prompt tokens that go through a GPU's experts together."""
        return max(GPU_PROMPT_ROWS, policy.micro_batch_size)

    def _expert_layers_s(self, tokens: float, each_s: Callable[[float], float]) -> float:
        """All experts once; `each_s` are seconds of one by its rows."""
        shape = self.shape
        active = distinct_experts(shape, tokens)
        if not active:
            return 0.0
        rows = tokens * shape.experts_per_token / active
        return len(shape.moe_layers) * active * each_s(rows)

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
        weights = policy.weights
        moved = self._moved_experts(load, policy) * self.dtypes.expert_bytes(self.shape)
        lanes = [("disk->dram", self._link_s("disk->dram", weights.disk * moved))]
        if not policy.ffn_on_gpu:
            return lanes
        upload = self._upload_s((1 - weights.vram) * moved)
        if policy.schedule in BLOCK_SCHEDULES:
            # A stream of its own, in which pinned buffers and the link take turns piece by piece.
            return [*lanes, ("weight block", max(time_s for _, time_s in upload))]
        if policy.schedule not in PAGED:
            # Chunks are copied into pinned buffers by whoever sends them up: the slower one counts.
            return [*lanes, ("dram->vram", max(time_s for _, time_s in upload))]
        return lanes + upload

    def _moved_experts(self, load: PassLoad, policy: Policy) -> float:
        """Experts that a pass would move if none were where they are computed. Some schedules bring
        whole layers, chosen or not; `simple` does so again for each micro-batch."""
        layers = len(self.shape.moe_layers)
        if policy.schedule not in WHOLE_LAYER_SCHEDULES:
            return distinct_experts(self.shape, load.tokens) * layers
        walks = load.decode_sequences / policy.micro_batch_size
        walks += load.prompt_tokens / self.prompt_rows(policy)
        num_walks = max(1.0, walks) if policy.schedule == "simple" else 1.0
        return num_walks * self.shape.num_experts * layers

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
