"""The decoder of all families, one step at a time: the caller decides what runs when, the family
what a step computes.

Shape letters: T tokens of the pass, N rows after bucketing, R rows of the cache or of logits,
M tokens of one expert, D hidden, L latent, K experts per token, H query heads, G KV heads,
C head size, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.formats.weight_format import Matrix
from moebatch.layout.scratch import Limits, converted_elements, step_elements
from moebatch.model import layers
from moebatch.model.attention.by_torch import Parts, Qkv
from moebatch.model.attention.core import AttentionCore
from moebatch.model.attention.span import Span
from moebatch.model.attention.stacked import StackedAttention
from moebatch.model.batch import BatchPlanner, MicroBatch
from moebatch.model.dense_weights import DenseWeights
from moebatch.model.elementwise import Elementwise
from moebatch.model.families.registry import FAMILIES
from moebatch.model.products import Products
from moebatch.model.recurrence.block import LayerWork
from moebatch.model.routed_experts import RoutedExperts
from moebatch.model.routing.choices import Choices
from moebatch.model.routing.gating import AdaptiveGating, GatingCount
from moebatch.model.routing.router import Routing
from moebatch.model.scratch import Frame, Scratch, chunks
from moebatch.model.streams import StreamMixer
from moebatch.spec.model.blocks import Mlp, Residual
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.stored_experts import StoredExperts


class Decoder:
    """Arithmetic of a model. Owns its scratch, so one thread may use it at a time.

    Every step says which rows of the pass it is for, so that some may be in another layer than
    others. What experts see and make is kept by row, until the row is routed again.
    """

    def __init__(
        self,
        shape: ModelShape,
        config: Mapping[str, Any],
        weights: DenseWeights,
        limits: Limits,
        *,
        experts: StoredExperts,
        gating: AdaptiveGating | None = None,
        activation_level: int = 0,
    ) -> None:
        """`config` is the raw config.json; `experts` says how those are stored; `gating` leaves
        out experts that matter little; the gate of a layer reads the input of the one that is
        `activation_level` layers with experts earlier, of which the first few have none (Pre-gated
        MoE).

        Raises CheckpointError for rotary parameters and activations that are not known.
        """
        embedding = weights.globals["embedding"]
        self.shape, self.dtype, self.device = shape, embedding.dtype, embedding.device
        self._weights, self._limits = weights, limits
        self._family = FAMILIES[shape.architecture]
        self._planner = BatchPlanner(
            shape, config, dtype=self.dtype, device=self.device, gather_rows=limits.gather_rows
        )
        self._core = AttentionCore(
            shape, limits, dtype=self.dtype, device=self.device, sink_scores=weights.sink_scores
        )
        self._streams = StreamMixer(shape) if shape.streams else None
        self._elementwise = elementwise = Elementwise(shape.activation, self.device)
        self._products = products = Products(
            self.device,
            self.dtype,
            stored=experts.taken_as,
            largest_matrix=converted_elements(shape),
        )
        step = step_elements(shape, limits)
        self.scratch = Scratch(step, device=self.device, dtype=self.dtype)
        blocks = {
            attention: self._family.attention(shape, attention, products, elementwise)
            for attention in shape.attentions
        }
        self._attention = [blocks[shape.attention_of(n)] for n in range(shape.num_layers)]
        self._recurrence = (
            self._family.recurrence(shape, shape.recurrence, products, elementwise, self.device)
            if shape.recurrence
            else None
        )
        self._stacked = (
            StackedAttention(
                shape, weights.globals, products, elementwise, self._core, self.scratch
            )
            if shape.encoder
            else None
        )
        self._choices = Choices(
            shape,
            weights,
            products,
            self._family.router,
            pass_tokens=limits.pass_tokens,
            gating=gating,
            activation_level=activation_level,
        )
        self._routed = RoutedExperts(
            shape, experts, self._family.expert, products, elementwise, self.scratch, limits
        )
        num_tokens, room = limits.pass_tokens, embedding.new_empty
        self._normed_TD = room(num_tokens, shape.hidden_size)
        self._latents_TL = (
            None if shape.latent_width is None else room(num_tokens, shape.latent_width)
        )
        self._outputs_TKD = room(num_tokens, shape.experts_per_token, shape.expert_size)
        self._late_TD = room(num_tokens, shape.hidden_size) if shape.adds_experts_late else None
        """What experts have made that is added at the end of the next layer."""
        self._attended_TD = (
            room(num_tokens, shape.hidden_size) if shape.adds_attention_late else None
        )
        """What attention has made that is added at the end of its own one."""

    @property
    def sink_scores(self) -> Mapping[int, Tensor]:
        """What an `AttentionCore` beside the decoder has to know of its weights."""
        return self._weights.sink_scores

    @property
    def scratch_bytes(self) -> int:
        """Bytes that are allocated up front."""
        parts = self._core.scratch_bytes, self._products.scratch_bytes
        late = self._late_TD, self._attended_TD
        own = self.scratch.buffer, self._normed_TD, self._latents_TL, *late
        beside = self._choices.num_bytes + self._routed.num_bytes + self._outputs_TKD.nbytes
        return sum(parts) + beside + sum(tensor.nbytes for tensor in own if tensor is not None)

    @property
    def gating_count(self) -> GatingCount | None:
        """What was decided by `gating`, if there is such."""
        return self._choices.gating_count

    def micro_batch(
        self,
        spans: Sequence[Span],
        *,
        apart: Mapping[int, Sequence[Span]] = MappingProxyType({}),
        attention_device: torch.device | None = None,
    ) -> MicroBatch:
        """What attention needs about spans, as `BatchPlanner.plan` has it."""
        return self._planner.plan(spans, apart=apart, attention_device=attention_device)

    def embed(self, tokens_T: Tensor, prompts: Sequence[slice] = ()) -> Tensor:
        """Begins a pass, in which `prompts` are rows of whole ones; its first hidden states
        [T, D]."""
        self._choices.begin(tokens_T, prompts)
        x_TD = F.embedding(tokens_T.to(self.device), self._weights.globals["embedding"])
        scale = self.shape.embedding_scale
        if self.shape.rounds_embedding_scale:
            scale = torch.tensor(scale, dtype=self.dtype).item()
        x_TD = x_TD if scale == 1 else x_TD.mul_(scale)
        return x_TD if self.shape.streams is None else x_TD.repeat(1, self.shape.streams.count)

    def attend(
        self,
        layer: int,
        x_TD: Tensor,
        micro_batch: MicroBatch,
        parts: Parts,
    ) -> None:
        """Adds a layer's attention, or its recurrence, to the rows of the micro-batch, in place.

        Writes what is new into the layer's cache, `parts`, which is on the decoder's device; a
        recurrent layer has those of `Recurrence.state` there, and changes them.
        """
        weights, x = self._weights.layers[layer], x_TD[micro_batch.start : micro_batch.stop]
        if self._stacked is not None:
            assert micro_batch.stacks is not None, "that of a model with an encoder"
            self._stacked.attend(layer, x, micro_batch.stacks, weights, parts)
            return
        frame = self.scratch.frame()
        normed_ND = self._normed(frame, x, weights, "input_norm")
        if self.shape.is_recurrent(layer):
            plan = micro_batch.recurrent
            assert self._recurrence is not None and plan is not None, "it recurs"
            work = LayerWork(layer=layer, frame=frame, plan=plan, weights=weights, state=parts)
            out_ND = self._recurrence.run(work, normed_ND)
        else:
            out_ND = self._attention[layer].attend(
                frame, layer, normed_ND, micro_batch, weights, self._core, parts
            )
        self._add_mixed(frame, layer, micro_batch, x, normed_ND, out_ND)

    def project(
        self, layer: int, x_TD: Tensor, micro_batch: MicroBatch, into: Qkv | None = None
    ) -> Qkv:
        """The first part of `attend`: what an `AttentionCore` needs of the micro-batch.

        Views of scratch that the next step overwrites, or of `into`, which has as many rows or
        more, on any device.
        """
        frame, weights = self.scratch.frame(), self._weights.layers[layer]
        x = x_TD[micro_batch.start : micro_batch.stop]
        normed_ND = self._normed(frame, x, weights, "input_norm")
        qkv = self._attention[layer].project(frame, normed_ND, micro_batch, weights)
        qkv = qkv.first(micro_batch.num_tokens)
        return qkv if into is None else qkv.copy_into(into)

    def add_attention(
        self, layer: int, x_TD: Tensor, micro_batch: MicroBatch, out_THV: Tensor
    ) -> None:
        """The last part of `attend`: adds what the core made of the micro-batch, in place.

        `out_THV` is on the decoder's device and may have more rows than the micro-batch.
        """
        frame, num_rows = self.scratch.frame(), self._products.rows(micro_batch.num_tokens)
        if len(out_THV) < num_rows:
            room_NHV = frame.take(num_rows, *out_THV.shape[1:])
            room_NHV[: len(out_THV)] = out_THV
            out_THV = room_NHV
        weights, out_NHV = self._weights.layers[layer], out_THV[:num_rows]
        x = x_TD[micro_batch.start : micro_batch.stop]
        normed_ND = x
        attention = self.shape.attention_of(layer)
        if attention.output_gate is not None or self.shape.attention_residual.keeps_normed:
            # The input is normed once more: other micro-batches may have had the scratch.
            normed_ND = self._normed(frame, x, weights, "input_norm")
        out_ND = self._attention[layer].output(frame, normed_ND, out_NHV, weights)
        self._add_mixed(frame, layer, micro_batch, x, normed_ND, out_ND)

    def _add_mixed(
        self,
        frame: Frame,
        layer: int,
        micro_batch: MicroBatch,
        x_TD: Tensor,
        normed_ND: Tensor,
        out_ND: Tensor,
    ) -> None:
        """What attention or recurrence has made; or keeps it for the end of the layer."""
        weights, out_TD = self._weights.layers[layer], out_ND[: len(x_TD)]
        made = self._made(frame, weights, "attention_out_norm", out_TD)
        if self._attended_TD is not None:
            self._attended_TD[micro_batch.start : micro_batch.stop] = made[0]
            return
        if self._streams is not None:
            self._streams.spread(frame, x_TD, weights, "input_norm", made[0])
            return
        residual = self.shape.mixer_residual(layer)
        self._add(frame, x_TD, normed_ND[: len(x_TD)], residual, made)

    def _add_attended(self, frame: Frame, layer: int, rows: slice, x_MD: Tensor) -> None:
        """What has been kept of attention, where that is added late."""
        if self._attended_TD is not None:
            kept = (self._attended_TD[rows],)
            self._add(frame, x_MD, x_MD, self.shape.mixer_residual(layer), kept)

    def route(self, layer: int, x_TD: Tensor, rows: slice | None = None) -> Routing:
        """Norms rows of a MoE layer's input and lets each token choose its experts; all if None.

        The routing lives in buffers of the decoder: it is valid until its rows are routed again.
        """
        weights, num_tokens = self._weights.layers[layer], len(x_TD)
        rows = slice(0, num_tokens) if rows is None else rows
        normed_TD, latents_TL = self._normed_TD[:num_tokens], None
        if self._latents_TL is not None:
            latents_TL = self._latents_TL[:num_tokens]
        for chunk in self._chunks(rows):
            frame = self.scratch.frame()
            role = self.shape.norm_of_mlps
            self._norm(frame, x_TD[chunk], weights, role, normed_TD[chunk])
            normed = self._bucketed(frame, normed_TD[chunk])
            if latents_TL is not None:
                latents_NL = self._products.of_role(frame, normed, weights, "latent_in")
                latents_TL[chunk] = latents_NL[: len(x_TD[chunk])]
            if "router_norm" in weights:
                normed = self._normed(frame, x_TD[chunk], weights, "router_norm")
            self._choices.choose(layer, chunk, frame, normed)
        return self._choices.routing(
            layer, rows, normed_TD, latents_TL, self._outputs_TKD[:num_tokens]
        )

    def join(self, routings: Sequence[Routing]) -> Routing:
        """One routing for the rows of several, as `Routing.join` has it."""
        return self._choices.join(routings)

    def run_experts(
        self, layer: int, routing: Routing, experts: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """Runs experts over all tokens that chose them and fills their ``routing.outputs_TKD``.

        Each is given with what was read of it, as `StoredExperts.pieces` names that. Raises
        CheckpointError where it cannot be decoded.
        """
        self._routed.run(layer, routing, experts)

    def combine(self, layer: int, x_TD: Tensor, routing: Routing) -> None:
        """Adds what the experts, and the shared expert where there is one, have made of the rows
        that were routed, in place; that of experts with the next layer, where they are late.

        Outputs of a token are summed in the order of its choices, whenever they were computed.
        """
        weights = self._weights.layers[layer]
        for rows in self._chunks(*routing.rows):
            frame, x_MD = self.scratch.frame(), x_TD[rows]
            parts: tuple[Tensor, ...] = (routing.outputs_TKD[rows],)
            if "latent_out" in weights:
                sum_NL = self._bucketed(frame, self._elementwise.sum(frame, *parts))
                sum_ND = self._products.of_role(frame, sum_NL, weights, "latent_out")
                parts = (sum_ND[: len(x_MD)],)
            if self.shape.router.num_identities:
                same_MD = frame.take(*x_MD.shape).copy_(routing.normed_TD[rows])
                same_MD.mul_(routing.identity_weights(rows))
                parts = (self._elementwise.sum(frame, *parts, same_MD),)
            parts = self._made(frame, weights, "experts_out_norm", *parts)
            if self._late_TD is not None:
                self._late_TD[rows] = self._elementwise.sum(frame, *parts)
                parts = ()
            if self.shape.shared_expert:
                y_MD = self._shared_expert(frame, layer, x_MD, routing.normed_TD[rows])
                parts += self._made(frame, weights, "shared_out_norm", y_MD)
            self._add_attended(frame, layer, rows, x_MD)
            if self._streams is not None:
                made_MD = self._elementwise.sum(frame, *parts)
                self._streams.spread(frame, x_MD, weights, self.shape.norm_of_mlps, made_MD)
            elif parts:
                made = self._made(frame, weights, "mlp_out_norm", *parts)
                self._add(frame, x_MD, routing.normed_TD[rows], self.shape.mlp_residual, made)
            self._end(x_MD, weights)

    def _shared_expert(self, frame: Frame, layer: int, x_MD: Tensor, normed_MD: Tensor) -> Tensor:
        weights, num_rows = self._weights.layers[layer], len(normed_MD)
        if "shared_norm" in weights:
            normed_ND = self._normed(frame, x_MD, weights, "shared_norm")
        else:
            normed_ND = self._bucketed(frame, normed_MD)
        room_N1 = frame.take(len(normed_ND), 1)
        matrices = _mlp_weights(weights, "shared", self.shape.shared_expert)
        y_MD = self._mlp(frame, layer, normed_ND, num_rows, matrices)
        if self.shape.shared_scale != 1:
            y_MD.mul_(self.shape.shared_scale)
        if not self.shape.shared_expert_gate:
            return y_MD
        mix_N1 = self._products.linear(normed_ND, weights["shared_mix"], None, room_N1)
        return y_MD.mul_(mix_N1[:num_rows].sigmoid_())

    def _mlp(
        self, frame: Frame, layer: int, x_ND: Tensor, num_rows: int, matrices: Mapping[str, Matrix]
    ) -> Tensor:
        elementwise = self._elementwise.clamping(self.shape.mlp_clamp(layer))
        return self._family.expert(frame, x_ND, num_rows, matrices, self._products, elementwise)

    def add_dense(self, layer: int, x_TD: Tensor, rows: slice | None = None) -> None:
        """Adds the MLP of a layer without experts, if it has one, to rows, in place; to all if
        None."""
        weights = self._weights.layers[layer]
        for chunk in self._chunks(slice(0, len(x_TD)) if rows is None else rows):
            frame, x = self.scratch.frame(), x_TD[chunk]
            if self.shape.has_mlp(layer):
                normed = self._normed(frame, x, weights, self.shape.norm_of_mlps)
                matrices = _mlp_weights(weights, "mlp", self.shape.dense)
                made = self._mlp(frame, layer, normed, len(x), matrices)
                late = () if self._late_TD is None else (self._late_TD[chunk],)
                parts = self._made(frame, weights, "mlp_out_norm", made, *late)
                self._add_attended(frame, layer, chunk, x)
                if self._streams is not None:
                    self._streams.spread(frame, x, weights, self.shape.norm_of_mlps, parts[0])
                else:
                    self._add(frame, x, normed[: len(x)], self.shape.mlp_residual, parts)
            self._end(x, weights)

    def _add(
        self,
        frame: Frame,
        x_MD: Tensor,
        normed_MD: Tensor,
        residual: Residual,
        parts: Sequence[Tensor],
    ) -> None:
        """Adds what has been made of hidden states to them, or to what their norm has made of
        them, in place."""
        if residual.keeps_normed:
            x_MD.copy_(normed_MD)
        if residual.kept != 1:
            x_MD.mul_(residual.kept)
        self._elementwise.add(frame, x_MD, *parts, scale=residual.added)

    def _made(
        self, frame: Frame, weights: Mapping[str, Tensor], norm: str, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        """Parts, or their sum through the norm of that role, where the layer has it."""
        if norm not in weights:
            return parts
        is_sum = len(parts) == 1 and parts[0].dim() == 2
        y_MD = parts[0] if is_sum else self._elementwise.sum(frame, *parts)
        room = frame.take_float(*y_MD.shape)
        self._elementwise.rms_norm(y_MD, weights[norm], self.shape.rms_eps, room, y_MD)
        return (y_MD,)

    def _end(self, x_MD: Tensor, weights: Mapping[str, Tensor]) -> None:
        """Of a layer."""
        if "layer_scale" in weights:
            x_MD.mul_(weights["layer_scale"])

    def logits(self, x_RD: Tensor) -> Tensor:
        """Logits [R, V] of the next token from the hidden states after all layers."""
        weights = self._weights.globals
        frame = self.scratch.frame()
        normed = self._normed(frame, x_RD, weights, "final_norm")
        head = weights.get("head", weights["embedding"])
        logits = torch.empty(len(normed), len(head), device=self.device, dtype=self.dtype)
        bias = weights.get("head_bias")
        logits = self._products.linear(normed, head, bias, logits)[: len(x_RD)]
        scale = self.shape.logit_scale
        logits = logits if scale == 1 else logits.mul_(scale)
        cap = self.shape.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _normed(
        self, frame: Frame, x_TD: Tensor, weights: Mapping[str, Tensor], role: str
    ) -> Tensor:
        """The norm of x with rows up to the next bucket; those beyond x hold garbage. Without that
        norm a layer takes x as it is."""
        normed_ND = frame.take(self._products.rows(len(x_TD)), self.shape.hidden_size)
        self._norm(frame, x_TD, weights, role, normed_ND[: len(x_TD)])
        return normed_ND

    def _norm(
        self, frame: Frame, x_TD: Tensor, weights: Mapping[str, Tensor], role: str, out_TD: Tensor
    ) -> None:
        if self._streams is not None:
            merged_TD = self._streams.merged(frame, x_TD, weights, role)
            x_TD = frame.take(*merged_TD.shape).copy_(merged_TD)
        if role not in weights:
            out_TD.copy_(x_TD)
            return
        room, eps, weight_D = frame.take_float(*x_TD.shape), self.shape.rms_eps, weights[role]
        if self.shape.norm.kind == "layer":
            layers.layer_norm(x_TD, weight_D, weights.get(f"{role}_bias"), eps, room, out_TD)
        else:
            self._elementwise.rms_norm(x_TD, weight_D, eps, room, out_TD)

    def _bucketed(self, frame: Frame, x: Tensor) -> Tensor:
        """The rows of x and some up to the next bucket, which hold garbage; x itself where products
        need no more."""
        num_rows = self._products.rows(len(x))
        if num_rows == len(x):
            return x
        room = frame.take(num_rows, *x.shape[1:])
        room[: len(x)] = x
        return room

    def _chunks(self, *rows: slice) -> Iterator[slice]:
        """The rows in portions that the scratch has room for."""
        return chunks(self._limits.expert_rows, *rows)


def _mlp_weights(weights: Mapping[str, Tensor], prefix: str, mlp: Mlp | None) -> dict[str, Matrix]:
    assert mlp is not None, "the model has one"
    return {role: weights[f"{prefix}_{role}"] for role in mlp.tensors(1)}
