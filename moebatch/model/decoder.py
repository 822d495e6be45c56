"""The decoder of all families, one step at a time: the caller decides what runs when, the family
what a step computes.

Shape letters: T tokens of the pass, N rows after bucketing, R rows of the cache or of logits,
M tokens of one expert, D hidden, K experts per token, H query heads, G KV heads, C head size,
V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.errors import CheckpointError
from moebatch.formats.weight_format import BadParts, Matrix
from moebatch.layout.scratch import Limits, converted_elements, step_elements
from moebatch.model import layers
from moebatch.model.attention import Parts, Qkv
from moebatch.model.attention_core import AttentionCore
from moebatch.model.batch import MicroBatch
from moebatch.model.dense_weights import DenseWeights
from moebatch.model.elementwise import Elementwise
from moebatch.model.families.registry import FAMILIES
from moebatch.model.gated_delta import GatedDeltaBlock
from moebatch.model.gating import AdaptiveGating, GatingCount
from moebatch.model.grouped_attention import gate_output
from moebatch.model.pregates import ChoicesAhead
from moebatch.model.products import Products
from moebatch.model.rope import Rope
from moebatch.model.router import ExpertTokens, Routing, group_by_expert, rank_among_alike
from moebatch.model.scratch import Frame, Scratch
from moebatch.model.span import Span
from moebatch.model.stacked_attention import StackedAttention
from moebatch.spec.shape import Mlp, ModelShape
from moebatch.spec.stored_experts import StoredExperts


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
        self.shape = shape
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._weights = weights
        self._limits = limits
        self.gating_count = GatingCount() if gating else None
        self._gating = gating
        self._core = AttentionCore(
            shape,
            limits,
            dtype=self.dtype,
            device=self.device,
            sink_scores=weights.sink_scores,
        )
        self._ropes = {} if shape.encoder else Rope.all_of(shape, config, self.device)
        self._elementwise = Elementwise(
            shape.activation, self.device, shape.clamped_gate, shape.residual_scale
        )
        self._experts = experts
        self._products = Products(
            self.device,
            self.dtype,
            stored=experts.taken_as,
            largest_matrix=converted_elements(shape),
        )
        self._has_wide_gates = shape.router.has_exact_logits and self.dtype != torch.float32
        self._gate_products = (
            Products(self.device, torch.float32) if self._has_wide_gates else self._products
        )
        self._family = FAMILIES[shape.architecture]
        blocks = {
            attention: self._family.attention(shape, attention, self._products, self._elementwise)
            for attention in shape.attentions
        }
        self._attention = [blocks[shape.attention_of(n)] for n in range(shape.num_layers)]
        self._recurrence = (
            GatedDeltaBlock(shape, self._products, self.device) if shape.recurrence else None
        )
        step = step_elements(shape, limits)
        self.scratch = Scratch(step, device=self.device, dtype=self.dtype)
        self._stacked = (
            StackedAttention(
                shape,
                weights.globals,
                self._products,
                self._elementwise,
                self._core,
                self.scratch,
            )
            if shape.encoder
            else None
        )
        self._prompts_T = torch.empty(0, dtype=torch.int64)
        """The prompt of every row of the pass, by number; -1 for tokens of answers."""
        tokens, choices, hidden = limits.pass_tokens, shape.experts_per_token, shape.hidden_size
        self._weights_TK = torch.empty(tokens, choices, device=self.device, dtype=torch.float32)
        self._experts_TK = torch.empty(tokens, choices, device=self.device, dtype=torch.int64)
        self._ones_TK = torch.ones_like(self._weights_TK) if shape.router.weighs_inputs else None
        """Weights of what experts make, where those of tokens are for what they see."""
        self._asked_TK = (
            None if shape.router.capacity is None else torch.empty_like(self._experts_TK)
        )
        self._ahead = ChoicesAhead(
            shape.moe_layers, activation_level, self._weights_TK, self._experts_TK
        )
        self._normed_TD = torch.empty(tokens, hidden, device=self.device, dtype=self.dtype)
        self._outputs_TKD = torch.empty(
            tokens, choices, hidden, device=self.device, dtype=self.dtype
        )

    @property
    def sink_scores(self) -> Sequence[Tensor]:
        """What an `AttentionCore` beside the decoder has to know of its weights."""
        return self._weights.sink_scores

    @property
    def scratch_bytes(self) -> int:
        """Bytes that are allocated up front."""
        by_row = [self._normed_TD, self._weights_TK, self._experts_TK, self._outputs_TKD]
        by_row += [] if self._ones_TK is None else [self._ones_TK]
        if self._asked_TK is not None:
            by_row.append(self._asked_TK)
        steps = self.scratch.buffer.nbytes + self._core.scratch_bytes
        steps += self._products.scratch_bytes
        return steps + self._ahead.num_bytes + sum(tensor.nbytes for tensor in by_row)

    def micro_batch(
        self,
        spans: Sequence[Span],
        *,
        apart: Mapping[int, Sequence[Span]] = MappingProxyType({}),
        attention_device: torch.device | None = None,
    ) -> MicroBatch:
        """What attention needs about spans that follow each other; it serves all layers.

        `apart` are the same tokens for layers with a sliding window whose cache has rows of its
        own. `attention_device` is that of the `AttentionCore`, if it is not the decoder's own.
        """
        attention = self.shape.attention
        if self.shape.encoder is not None:
            return MicroBatch.of_stacks(spans, self.device, gather_rows=self._limits.gather_rows)
        return MicroBatch.of(
            spans,
            ropes=self._ropes,
            windows=set(self.shape.sliding_windows),
            dtype=self.dtype,
            gather_rows=self._limits.gather_rows,
            apart=apart,
            sink_window=attention.sink_window,
            attention_device=attention_device,
            recurs=self._recurrence is not None,
            # Elsewhere there are no weights to make more of what is cached.
            expands=attention.expands if attention_device is None else None,
            num_shared=attention.num_shared,
            in_chunks=self.shape.windows_are_chunks,
        )

    def embed(self, tokens_T: Tensor, prompts: Sequence[slice] = ()) -> Tensor:
        """The first hidden states [T, D] of a pass, in which `prompts` are rows of whole ones."""
        if self.shape.router.capacity is not None:
            prompts_T = torch.full(tokens_T.shape, -1)
            for number, rows in enumerate(prompts):
                prompts_T[rows] = number
            self._prompts_T = prompts_T.to(self.device)
        x_TD = F.embedding(tokens_T.to(self.device), self._weights.globals["embedding"])
        scale = self.shape.embedding_scale
        if self.shape.rounds_embedding_scale:
            scale = torch.tensor(scale, dtype=self.dtype).item()
        return x_TD if scale == 1 else x_TD.mul_(scale)

    def attend(
        self,
        layer: int,
        x_TD: Tensor,
        micro_batch: MicroBatch,
        parts: Parts,
    ) -> None:
        """Adds a layer's attention, or its recurrence, to the rows of the micro-batch, in place.

        Writes what is new into the layer's cache, `parts`, which is on the decoder's device; a
        recurrent layer has those of `GatedDelta.state` there, and changes them.
        """
        weights, x = self._weights.layers[layer], x_TD[micro_batch.start : micro_batch.stop]
        if self._stacked is not None:
            assert micro_batch.stacks is not None, "that of a model with an encoder"
            self._stacked.attend(layer, x, micro_batch.stacks, weights, parts)
            return
        frame = self.scratch.frame()
        normed_ND = self._normed(frame, x, weights, "input_norm")
        if self.shape.is_recurrent(layer):
            assert self._recurrence is not None and micro_batch.recurrent is not None, "it recurs"
            out_ND = self._recurrence.run(frame, normed_ND, micro_batch.recurrent, weights, parts)
        else:
            out_ND = self._attention[layer].attend(
                frame, layer, normed_ND, micro_batch, weights, self._core, parts
            )
        self._add(frame, x, weights, "attention_out_norm", out_ND[: micro_batch.num_tokens])

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
        if "output_gate" in weights:
            # The input is normed once more: other micro-batches may have had the scratch.
            apart = frame.branch()
            normed_ND = self._normed(apart, x, weights, "input_norm")
            gate_output(apart, normed_ND, out_NHV, weights, self._products)
        out_ND = self._attention[layer].output(frame, out_NHV, weights)
        self._add(frame, x, weights, "attention_out_norm", out_ND[: micro_batch.num_tokens])

    def route(self, layer: int, x_TD: Tensor, rows: slice | None = None) -> Routing:
        """Norms rows of a MoE layer's input and lets each token choose its experts; all if None.

        The routing lives in buffers of the decoder: it is valid until its rows are routed again.
        """
        weights, num_tokens = self._weights.layers[layer], len(x_TD)
        rows = slice(0, num_tokens) if rows is None else rows
        normed_TD, weights_TK = self._normed_TD[:num_tokens], self._weights_TK[:num_tokens]
        experts_TK = self._experts_TK[:num_tokens]
        for chunk in self._chunks(rows):
            frame, num_rows = self.scratch.frame(), chunk.stop - chunk.start
            normed = self._normed(frame, x_TD[chunk], weights, "mlp_norm")
            normed_TD[chunk] = normed[:num_rows]
            if "router_norm" in weights:
                normed = self._normed(frame, x_TD[chunk], weights, "router_norm")
            self._choose(layer, chunk, *self._for_gates(frame, normed))
            self._leave_out(layer, chunk)
        asked_TK = self._turn_away(layer, rows)
        return Routing(
            rows=(rows,),
            normed_TD=normed_TD,
            weights_TK=weights_TK,
            experts_TK=experts_TK,
            num_experts=self.shape.num_experts,
            tokens=group_by_expert(experts_TK, rows, self.shape.num_experts),
            outputs_TKD=self._outputs_TKD[:num_tokens],
            ahead=self._ahead.experts(layer, rows, self.shape.num_experts),
            asked_TK=asked_TK,
        )

    def _for_gates(self, frame: Frame, normed_ND: Tensor) -> tuple[Tensor, Tensor]:
        """What gates see of rows, in the numbers that they compute in, and room for logits."""
        num_experts = self.shape.num_experts
        if not self._has_wide_gates:
            return normed_ND, frame.take(len(normed_ND), num_experts)
        wide_ND = frame.take_float(*normed_ND.shape).copy_(normed_ND)
        return wide_ND, frame.take_float(len(normed_ND), num_experts)

    def _choose(self, layer: int, rows: slice, input_ND: Tensor, room_NE: Tensor) -> None:
        """Choices of rows for the layer, by its gate now or kept since an earlier layer; and for
        the later one whose gate reads this layer's input, if there is one."""
        weights_RK, experts_RK = self._weights_TK[rows], self._experts_TK[rows]
        if self._ahead.is_chosen_earlier(layer):
            kept_weights_RK, kept_experts_RK = self._ahead.kept(layer, rows)
            weights_RK.copy_(kept_weights_RK)
            experts_RK.copy_(kept_experts_RK)
        else:
            self._ask(layer, input_ND, room_NE, weights_RK, experts_RK)
        later = self._ahead.later(layer)
        if later is not None:
            self._ask(later, input_ND, room_NE, *self._ahead.kept(later, rows))

    def _ask(
        self,
        layer: int,
        input_ND: Tensor,
        room_NE: Tensor,
        weights_RK: Tensor,
        experts_RK: Tensor,
    ) -> None:
        """Asks the gate of a layer; what it chooses for rows goes into the two tensors."""
        weights = self._weights.layers[layer]
        logits_NE = self._gate_products.linear(
            input_ND, weights["router"], weights.get("router_bias"), room_NE
        )
        logits_RE = logits_NE[: len(weights_RK)]
        chosen_RK, chosen_experts_RK = self._family.router(
            logits_RE, self.shape, weights, self.dtype
        )
        weights_RK.copy_(chosen_RK)
        experts_RK.copy_(chosen_experts_RK)

    def _leave_out(self, layer: int, rows: slice) -> None:
        """Choices that are left out count as done, and have made nothing."""
        if self._gating is None or self.gating_count is None:
            return
        experts_RK, num_experts = self._experts_TK[rows], self.shape.num_experts
        self._gating.drop(layer, self._weights_TK[rows], experts_RK, num_experts)
        is_left_out_RK = experts_RK == num_experts
        self._outputs_TKD[rows].masked_fill_(is_left_out_RK[..., None], 0.0)
        self.gating_count.add(is_left_out_RK)

    def _turn_away(self, layer: int, rows: slice) -> Tensor | None:
        """Tokens of a prompt for which the expert that they have chosen has no room count as
        choices that are left out; returns what all have chosen, if there may be such."""
        capacity, num_experts = self.shape.router.capacity, self.shape.num_experts
        if capacity is None or not self.shape.encodes(layer) or rows.start == rows.stop:
            return None
        assert self.shape.experts_per_token == 1, "only first choices have a place in a row"
        assert self._asked_TK is not None, "there is room where experts may have none"
        self._asked_TK[rows] = self._experts_TK[rows]
        experts_R = self._experts_TK[rows].view(-1)
        rank_R = rank_among_alike(self._prompts_T[rows] * num_experts + experts_R)
        is_late_R = rank_R >= capacity
        experts_R.masked_fill_(is_late_R, num_experts)
        self._outputs_TKD[rows].masked_fill_(is_late_R[:, None, None], 0.0)
        return self._asked_TK

    def run_expert(
        self, layer: int, routing: Routing, expert: int, parts: Sequence[Tensor]
    ) -> None:
        """Runs one expert over all tokens that chose it and fills its ``routing.outputs_TKD``.

        `parts` are what was read of it, as `StoredExperts.pieces` names them. Raises
        CheckpointError where they cannot be decoded.
        """
        try:
            self._compute_expert(routing, expert, self._experts.matrices(parts, layer, expert))
        except BadParts as error:
            raise CheckpointError(f"layer {layer}, expert {expert}: {error}") from None

    def _compute_expert(
        self, routing: Routing, expert: int, matrices: Mapping[str, Matrix]
    ) -> None:
        rows_M, choices_M = routing.tokens[expert]
        for chunk in self._chunks(slice(0, len(rows_M))):
            tokens = ExpertTokens(rows_M[chunk], choices_M[chunk])
            frame, num_rows = self.scratch.frame(), tokens.rows_M.shape[0]
            x_ND = frame.take(self._products.rows(num_rows), self.shape.hidden_size)
            torch.index_select(routing.normed_TD, 0, tokens.rows_M, out=x_ND[:num_rows])
            if self._ones_TK is not None:
                x_ND[:num_rows].mul_(routing.weights_TK[tokens.rows_M, tokens.choices_M][:, None])
            y_MD = self._mlp(frame, x_ND, num_rows, matrices)
            weights_TK = routing.weights_TK if self._ones_TK is None else self._ones_TK
            self._elementwise.place(y_MD, tokens, routing.outputs_TKD, weights_TK)

    def combine(self, layer: int, x_TD: Tensor, routing: Routing) -> None:
        """Adds what the experts, and the shared expert where there is one, have made of the rows
        that were routed, in place.

        Outputs of a token are summed in the order of its choices, whenever they were computed.
        """
        weights = self._weights.layers[layer]
        for rows in self._chunks(*routing.rows):
            frame, x_MD = self.scratch.frame(), x_TD[rows]
            parts = self._made(frame, weights, "experts_out_norm", routing.outputs_TKD[rows])
            if self.shape.shared_expert:
                y_MD = self._shared_expert(frame, weights, x_MD, routing.normed_TD[rows])
                parts += self._made(frame, weights, "shared_out_norm", y_MD)
            self._add(frame, x_MD, weights, "mlp_out_norm", *parts)
            self._end(x_MD, weights)

    def _shared_expert(
        self, frame: Frame, weights: Mapping[str, Tensor], x_MD: Tensor, normed_MD: Tensor
    ) -> Tensor:
        num_rows = len(normed_MD)
        if "shared_norm" in weights:
            normed_ND = self._normed(frame, x_MD, weights, "shared_norm")
        else:
            normed_ND = frame.take(self._products.rows(num_rows), self.shape.hidden_size)
            normed_ND[:num_rows] = normed_MD
        room_N1 = frame.take(len(normed_ND), 1)
        y_MD = self._mlp(
            frame, normed_ND, num_rows, _mlp_weights(weights, "shared", self.shape.shared_expert)
        )
        if not self.shape.shared_expert_gate:
            return y_MD
        mix_N1 = self._products.linear(normed_ND, weights["shared_mix"], None, room_N1)
        return y_MD.mul_(mix_N1[:num_rows].sigmoid_())

    def _mlp(
        self, frame: Frame, x_ND: Tensor, num_rows: int, matrices: Mapping[str, Matrix]
    ) -> Tensor:
        products, elementwise = self._products, self._elementwise
        return self._family.expert(frame, x_ND, num_rows, matrices, products, elementwise)

    def add_dense(self, layer: int, x_TD: Tensor, rows: slice | None = None) -> None:
        """Adds the MLP of a layer without experts to rows, in place; to all if None."""
        weights = self._weights.layers[layer]
        mlp = _mlp_weights(weights, "mlp", self.shape.dense)
        for chunk in self._chunks(slice(0, len(x_TD)) if rows is None else rows):
            frame, x = self.scratch.frame(), x_TD[chunk]
            normed = self._normed(frame, x, weights, "mlp_norm")
            made = self._mlp(frame, normed, len(x), mlp)
            self._add(frame, x, weights, "mlp_out_norm", made)
            self._end(x, weights)

    def _add(
        self, frame: Frame, x_MD: Tensor, weights: Mapping[str, Tensor], norm: str, *parts: Tensor
    ) -> None:
        """Adds what has been made of hidden states to them, in place."""
        self._elementwise.add(frame, x_MD, *self._made(frame, weights, norm, *parts))

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
        """The norm of x with rows up to the next bucket; those beyond x hold garbage."""
        normed_ND = frame.take(self._products.rows(len(x_TD)), self.shape.hidden_size)
        room, eps = frame.take_float(*x_TD.shape), self.shape.rms_eps
        weight_D, out_TD = weights[role], normed_ND[: len(x_TD)]
        if self.shape.norm.kind == "layer":
            layers.layer_norm(x_TD, weight_D, weights.get(f"{role}_bias"), eps, room, out_TD)
        else:
            self._elementwise.rms_norm(x_TD, weight_D, eps, room, out_TD)
        return normed_ND

    def _chunks(self, *rows: slice) -> Iterator[slice]:
        """The rows in portions that the scratch has room for."""
        step = self._limits.expert_rows
        for part in rows:
            for start in range(part.start, part.stop, step):
                yield slice(start, min(start + step, part.stop))


def _mlp_weights(weights: Mapping[str, Tensor], prefix: str, mlp: Mlp | None) -> dict[str, Matrix]:
    assert mlp is not None, "the model has one"
    return {role: weights[f"{prefix}_{role}"] for role in mlp.tensors(1)}
