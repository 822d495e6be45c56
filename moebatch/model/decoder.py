"""The decoder of all families, one step at a time: the caller decides what runs when.

Shape letters: T tokens of the pass, N rows after bucketing, R rows of the cache or of logits,
M tokens of one expert, D hidden, K experts per token, H query heads, G KV heads, C head size,
V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.model.attention import LayerKv, attend
from moebatch.model.batch import MicroBatch, Span
from moebatch.model.families import ExpertWeights, expert_weights
from moebatch.model.layers import activation_of, gated_mlp, linear, rms_norm
from moebatch.model.rope import Rope, rotate
from moebatch.model.router import Routing, choose_experts, group_by_expert
from moebatch.model.scratch import Frame, Scratch
from moebatch.plan.scratch import Limits, bucket_rows, step_elements
from moebatch.spec.shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWeights:
    """Everything but the experts, by role, in the dtype and on the device of the computation."""

    globals: Mapping[str, Tensor]
    layers: Sequence[Mapping[str, Tensor]]


class Decoder:
    """Arithmetic of a model. Owns its scratch, so one thread may use it at a time."""

    def __init__(
        self,
        shape: ModelShape,
        config: Mapping[str, Any],
        weights: DenseWeights,
        limits: Limits,
        *,
        expert_dtype: torch.dtype | None = None,
    ) -> None:
        """`config` is the raw config.json; `expert_dtype` is that of stored experts, if another.

        Raises CheckpointError for rotary parameters and activations that are not known.
        """
        embedding = weights.globals["embedding"]
        self.shape = shape
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._weights = weights
        self._limits = limits
        self._rope = Rope(shape, config, self.device)
        self._activation = activation_of(shape.activation)
        converts = expert_dtype not in (None, self.dtype)
        step = step_elements(shape, limits, converts=converts)
        self.scratch = Scratch(step, device=self.device, dtype=self.dtype)
        tokens, choices, hidden = limits.pass_tokens, shape.experts_per_token, shape.hidden_size
        self._normed_TD = torch.empty(tokens, hidden, device=self.device, dtype=self.dtype)
        self._outputs_TKD = torch.empty(
            tokens, choices, hidden, device=self.device, dtype=self.dtype
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes that are allocated up front."""
        return self.scratch.buffer.nbytes + self._normed_TD.nbytes + self._outputs_TKD.nbytes

    def micro_batch(self, spans: Sequence[Span]) -> MicroBatch:
        """What `attend` needs about spans that follow each other; it serves all layers."""
        return MicroBatch.of(
            spans,
            rope=self._rope,
            windows=set(self.shape.sliding_windows),
            dtype=self.dtype,
            gather_rows=self._limits.gather_rows,
        )

    def embed(self, tokens_T: Tensor) -> Tensor:
        """The first hidden states [T, D]."""
        return F.embedding(tokens_T, self._weights.globals["embedding"])

    def attend(
        self,
        layer: int,
        x_TD: Tensor,
        micro_batch: MicroBatch,
        keys_RGC: Tensor,
        values_RGC: Tensor,
    ) -> None:
        """Adds a layer's attention to the rows of the micro-batch, in place.

        Writes the new keys and values into the layer's cache.
        """
        weights = self._weights.layers[layer]
        x = x_TD[micro_batch.start : micro_batch.stop]
        num_tokens = len(x)
        frame = self.scratch.frame()
        normed = self._normed(frame, x, weights["input_norm"])
        q, k, v = self._project(frame, normed, weights)
        q_THC, k_TGC, v_TGC = q[:num_tokens], k[:num_tokens], v[:num_tokens]
        rotate(q_THC, micro_batch.cos_TR, micro_batch.sin_TR)
        rotate(k_TGC, micro_batch.cos_TR, micro_batch.sin_TR)
        kv = self._layer_kv(frame, keys_RGC, values_RGC)
        kv.write(micro_batch.new_rows_T, k_TGC, v_TGC)
        out_NHC = frame.take(*q.shape)
        plan = micro_batch.plans[self.shape.sliding_windows[layer]]
        attend(q_THC, k_TGC, v_TGC, plan, kv, out_NHC[:num_tokens])
        out_ND = linear(
            out_NHC.flatten(1), weights["o"], weights.get("o_bias"), frame.take(*normed.shape)
        )
        x += out_ND[:num_tokens]

    def route(self, layer: int, x_TD: Tensor) -> Routing:
        """Norms the input of a MoE layer and lets each token choose its experts.

        The routing lives in buffers of the decoder: it is valid until the next call.
        """
        weights = self._weights.layers[layer]
        normed_TD = self._normed_TD[: len(x_TD)]
        logits_TE = x_TD.new_empty(len(x_TD), self.shape.num_experts)
        for rows in self._row_chunks(len(x_TD)):
            frame = self.scratch.frame()
            normed = self._normed(frame, x_TD[rows], weights["mlp_norm"])
            room = frame.take(len(normed), self.shape.num_experts)
            logits = linear(normed, weights["router"], None, room)
            num_rows = rows.stop - rows.start
            normed_TD[rows], logits_TE[rows] = normed[:num_rows], logits[:num_rows]
        # Mixtral alone keeps the weights in float32.
        is_mixtral = self.shape.architecture == "MixtralForCausalLM"
        weights_TK, experts_TK = choose_experts(
            logits_TE,
            self.shape.experts_per_token,
            normalise=self.shape.norm_topk_prob,
            weights_dtype=torch.float32 if is_mixtral else self.dtype,
        )
        return Routing(
            normed_TD=normed_TD,
            weights_TK=weights_TK,
            tokens=group_by_expert(experts_TK, self.shape.num_experts),
            outputs_TKD=self._outputs_TKD[: len(x_TD)],
        )

    def run_expert(
        self, layer: int, routing: Routing, expert: int, parts: Sequence[Tensor]
    ) -> None:
        """Runs one expert over all tokens that chose it and fills its ``routing.outputs_TKD``.

        `parts` are the tensors of `Family.expert_parts`, in any floating dtype.
        """
        weights = expert_weights(parts)
        rows_M, choices_M = routing.tokens[expert]
        weights_M = routing.weights_TK[rows_M, choices_M].float()
        for chunk in self._row_chunks(len(rows_M)):
            rows = rows_M[chunk]
            frame = self.scratch.frame()
            x_ND = frame.take(bucket_rows(len(rows)), self.shape.hidden_size)
            torch.index_select(routing.normed_TD, 0, rows, out=x_ND[: len(rows)])
            y_ND = gated_mlp(frame, x_ND, weights, self._activation)
            y_MD = y_ND[: len(rows)].mul_(weights_M[chunk, None])
            places = rows * self.shape.experts_per_token + choices_M[chunk]
            routing.outputs_TKD.flatten(0, 1).index_copy_(0, places, y_MD)

    def combine(self, layer: int, x_TD: Tensor, routing: Routing) -> None:
        """Adds what the experts, and the shared expert where there is one, have made of x to x.

        Outputs of a token are summed in the order of its choices, whenever they were computed.
        """
        for rows in self._row_chunks(len(x_TD)):
            frame = self.scratch.frame()
            sum_MD = frame.take_float(rows.stop - rows.start, self.shape.hidden_size)
            torch.sum(routing.outputs_TKD[rows], 1, dtype=torch.float32, out=sum_MD)
            if self.shape.shared_expert_width:
                sum_MD += self._shared_expert(frame, layer, routing.normed_TD[rows])
            x_TD[rows] += sum_MD.to(x_TD.dtype)

    def _shared_expert(self, frame: Frame, layer: int, normed_MD: Tensor) -> Tensor:
        weights = self._weights.layers[layer]
        normed_ND = frame.take(bucket_rows(len(normed_MD)), self.shape.hidden_size)
        normed_ND[: len(normed_MD)] = normed_MD
        mix = linear(normed_ND, weights["shared_mix"], None, frame.take(len(normed_ND), 1))
        y_ND = gated_mlp(frame, normed_ND, _mlp_weights(weights, "shared"), self._activation)
        return y_ND.mul_(mix.sigmoid_())[: len(normed_MD)]

    def add_dense(self, layer: int, x_TD: Tensor) -> None:
        """Adds the MLP of a layer without experts to all rows, in place."""
        weights = self._weights.layers[layer]
        mlp = _mlp_weights(weights, "mlp")
        for rows in self._row_chunks(len(x_TD)):
            frame = self.scratch.frame()
            normed = self._normed(frame, x_TD[rows], weights["mlp_norm"])
            x_TD[rows] += gated_mlp(frame, normed, mlp, self._activation)[: rows.stop - rows.start]

    def logits(self, x_RD: Tensor) -> Tensor:
        """Logits [R, V] of the next token from the hidden states after all layers."""
        weights = self._weights.globals
        frame = self.scratch.frame()
        normed = self._normed(frame, x_RD, weights["final_norm"])
        head = weights.get("head", weights["embedding"])
        return F.linear(normed, head)[: len(x_RD)]

    def _normed(self, frame: Frame, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        """The norm of x with rows up to the next bucket; those beyond x hold garbage."""
        normed_ND = frame.take(bucket_rows(len(x_TD)), self.shape.hidden_size)
        room = frame.take_float(*x_TD.shape)
        rms_norm(x_TD, weight_D, self.shape.rms_eps, room, normed_ND[: len(x_TD)])
        return normed_ND

    def _project(
        self, frame: Frame, normed_ND: Tensor, weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, C], keys and values [N, G, C], without rotation."""
        shape, projected = self.shape, []
        norm_room = frame.take_float(len(normed_ND) * shape.query_width * (shape.qk_norm != "none"))
        for role in ("q", "k", "v"):
            room = frame.take(len(normed_ND), weights[role].shape[0])
            y = linear(normed_ND, weights[role], weights.get(f"{role}_bias"), room)
            y_NHC = y.view(len(y), -1, shape.head_dim)
            norm = weights.get(f"{role}_norm")
            if norm is not None:
                normed = y_NHC if shape.qk_norm == "head" else y
                rms_norm(normed, norm, shape.rms_eps, norm_room, normed)
            if shape.clip_qkv is not None:
                y.clamp_(-shape.clip_qkv, shape.clip_qkv)
            projected.append(y_NHC)
        q_NHC, k_NGC, v_NGC = projected
        return q_NHC, k_NGC, v_NGC

    def _layer_kv(self, frame: Frame, keys_RGC: Tensor, values_RGC: Tensor) -> LayerKv:
        rows, heads, head_dim = self._limits.kv_rows, self.shape.num_kv_heads, self.shape.head_dim
        return LayerKv(
            keys_RGC=keys_RGC,
            values_RGC=values_RGC,
            gathered_keys_SGC=frame.take(rows, heads, head_dim),
            gathered_values_SGC=frame.take(rows, heads, head_dim),
        )

    def _row_chunks(self, num_rows: int) -> Iterator[slice]:
        step = self._limits.expert_rows
        for start in range(0, num_rows, step):
            yield slice(start, min(start + step, num_rows))


def _mlp_weights(weights: Mapping[str, Tensor], prefix: str) -> ExpertWeights:
    return ExpertWeights(*(weights[f"{prefix}_{part}"] for part in ("gate", "up", "down")))
