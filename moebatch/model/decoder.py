"""The decoder of all families, one step at a time: the caller decides what runs when, the family
what a step computes.

Shape letters: T tokens of the pass, N rows after bucketing, R rows of the cache or of logits,
M tokens of one expert, D hidden, L latent, K experts per token, H query heads, G KV heads,
C head size, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moebatch.formats.weight_format import Matrix
from moebatch.layout.scratch import (
    Limits,
    block_rows,
    bucket_rows,
    converted_elements,
    step_elements,
)
from moebatch.model.attention.by_torch import Parts, Qkv
from moebatch.model.attention.core import AttentionCore
from moebatch.model.attention.stacked import StackedAttention
from moebatch.model.batch import BatchPlanner, MicroBatch
from moebatch.model.dense_weights import DenseWeights
from moebatch.model.elementwise import Elementwise
from moebatch.model.families.registry import FAMILIES
from moebatch.model.layer_work import LayerWork
from moebatch.model.operators import Operators
from moebatch.model.products import Products, Weights
from moebatch.model.recurrence.block import RecurrentBlock
from moebatch.model.residuals import Residuals
from moebatch.model.routed_experts import RoutedExperts
from moebatch.model.routing.choices import Choices
from moebatch.model.routing.gating import AdaptiveGating, GatingCount
from moebatch.model.routing.router import Routing
from moebatch.model.scratch import Frame, Scratch, chunks
from moebatch.spec.model.blocks import Mlp
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
        embedding, pass_tokens = weights.globals["embedding"], limits.pass_tokens
        self.shape, self.dtype, self.device = shape, embedding.dtype, embedding.device
        self._weights, self._limits = weights, limits
        self._family = FAMILIES[shape.architecture]
        self.planner = BatchPlanner(
            shape,
            config,
            dtype=self.dtype,
            device=self.device,
            gather_rows=limits.gather_rows,
            growth_R=weights.globals.get("rotary_growth"),
        )
        products = Products(
            self.device,
            self.dtype,
            stored=experts.taken_as,
            largest_matrix=converted_elements(shape),
        )
        self._operators = Operators(products, Elementwise(shape.activation, self.device))
        self._products, self._elementwise = self._operators
        self.scratch = Scratch(step_elements(shape, limits), device=self.device, dtype=self.dtype)
        self._hidden_TD = embedding.new_empty(pass_tokens, shape.hidden_width)
        """Of the pass in work. New ones for each pass, and for each block of logits, would leave
        holes of their size in an allocator's heap."""
        num_rows = bucket_rows(self.logits_rows)
        self._logits_NV = embedding.new_empty(num_rows, shape.vocab_size)
        self._residuals = Residuals(shape, weights, self._operators, pass_tokens=pass_tokens)
        self._core = AttentionCore(
            shape, limits, dtype=self.dtype, device=self.device, sink_scores=weights.sink_scores
        )
        means = self._operators, self._core
        self._attention = shape.by_layer(lambda each: self._family.attention(shape, each, *means))
        self._recurrence, self._stacked = self._recurrent_block(), self._stacked_attention()
        self._choices = Choices(
            shape,
            weights,
            products,
            self._family.router,
            pass_tokens=pass_tokens,
            gating=gating,
            activation_level=activation_level,
        )
        self._routed = RoutedExperts(
            shape, experts, self._family.expert, self._operators, self.scratch, limits
        )

    def _recurrent_block(self) -> RecurrentBlock | None:
        shape, recurrence = self.shape, self.shape.recurrence
        if recurrence is None:
            return None
        return self._family.recurrence(shape, recurrence, self._operators)

    def _stacked_attention(self) -> StackedAttention | None:
        if self.shape.encoder is None:
            return None
        return StackedAttention(self.shape, self._weights.globals, self._operators, self._core)

    @property
    def sink_scores(self) -> Mapping[int, Tensor]:
        """What an `AttentionCore` beside the decoder has to know of its weights."""
        return self._weights.sink_scores

    @property
    def scratch_bytes(self) -> int:
        """Bytes that are allocated up front."""
        kept = self._residuals.num_bytes + self._choices.num_bytes + self._routed.num_bytes
        own = self._core.scratch_bytes + self._products.scratch_bytes + self.scratch.buffer.nbytes
        return kept + own + self._hidden_TD.nbytes + self._logits_NV.nbytes

    @property
    def logits_rows(self) -> int:
        """Most rows of logits at a time."""
        return block_rows(self.shape, self._limits, self.dtype.itemsize)

    @property
    def gating_count(self) -> GatingCount | None:
        """What was decided by `gating`, if there is such."""
        return self._choices.gating_count

    def embed(self, tokens_T: Tensor, prompts: Sequence[slice] = ()) -> Tensor:
        """Begins a pass, in which `prompts` are rows of whole ones; its first hidden states
        [T, D], which are there until the next pass begins."""
        self._choices.begin(tokens_T, prompts)
        all_TD = self._hidden_TD[: len(tokens_T)]
        x_TD, *copies = torch.split(all_TD, self.shape.hidden_size, dim=1)
        embedding, tokens_T = self._weights.globals["embedding"], tokens_T.to(self.device)
        torch.index_select(embedding, 0, tokens_T, out=x_TD)
        for rows in self._chunks(slice(0, len(x_TD))) if self.shape.norms_embedding else ():
            self._residuals.embedded(self.scratch.frame(), x_TD[rows])
        scale = self.shape.embedding_scale
        if self.shape.rounds_embedding_scale:
            scale = torch.tensor(scale, dtype=self.dtype).item()
        x_TD = x_TD if scale == 1 else x_TD.mul_(scale)
        for copy_TD in copies:
            copy_TD.copy_(x_TD)
        return all_TD

    def attend(self, layer: int, x_TD: Tensor, micro_batch: MicroBatch, parts: Parts) -> None:
        """Adds a layer's attention, or its recurrence, to the rows of the micro-batch, in place.

        Writes what is new into the layer's cache, `parts`, which is on the decoder's device; a
        recurrent layer has those of `Recurrence.state` there, and changes them.
        """
        if self._stacked is not None:
            self._stacked.attend(self._work(layer, x_TD, micro_batch, parts, is_normed=False))
            return
        work = self._work(layer, x_TD, micro_batch, parts)
        if self.shape.is_recurrent(layer):
            assert self._recurrence is not None, "it recurs"
            out_ND = self._recurrence.run(work)
        else:
            out_ND = self._attention[layer].attend(work)
        self._residuals.add_mixed(work, x_TD, out_ND)

    def project(
        self, layer: int, x_TD: Tensor, micro_batch: MicroBatch, into: Qkv | None = None
    ) -> Qkv:
        """The first part of `attend`: what an `AttentionCore` needs of the micro-batch.

        Views of scratch that the next step overwrites, or of `into`, which has as many rows or
        more, on any device.
        """
        qkv = self._attention[layer].project(self._work(layer, x_TD, micro_batch))
        qkv = qkv.first(micro_batch.num_tokens)
        return qkv if into is None else qkv.copy_into(into)

    def add_attention(
        self, layer: int, x_TD: Tensor, micro_batch: MicroBatch, out_THV: Tensor
    ) -> None:
        """The last part of `attend`: adds what the core made of the micro-batch, in place.

        `out_THV` is on the decoder's device and may have more rows than the micro-batch.
        """
        is_gated = self.shape.attention_of(layer).output_gate is not None
        # The input is normed once more: other micro-batches may have had the scratch.
        is_normed = is_gated or self.shape.attention_residual.keeps_normed
        work = self._work(layer, x_TD, micro_batch, is_normed=is_normed)
        out_NHV = self._products.bucketed(work.frame, out_THV, micro_batch.num_tokens)
        out_ND = self._attention[layer].output(work, out_NHV)
        self._residuals.add_mixed(work, x_TD, out_ND)

    def _work(
        self,
        layer: int,
        x_TD: Tensor,
        micro_batch: MicroBatch,
        parts: Parts = (),
        *,
        is_normed: bool = True,
    ) -> LayerWork:
        """A step of a layer, of its input as it is where no norm of it is needed."""
        frame, weights = self.scratch.frame(), self._weights.layers[layer]
        x = x_TD[micro_batch.rows]
        return LayerWork(
            layer=layer,
            frame=frame,
            normed_ND=self._residuals.normed(frame, x, layer, "input_norm") if is_normed else x,
            micro_batch=micro_batch,
            weights=weights,
            parts=parts,
        )

    def route(self, layer: int, x_TD: Tensor, rows: slice | None = None) -> Routing:
        """Norms rows of a MoE layer's input and lets each token choose its experts; all if None.

        The routing lives in buffers of the decoder: it is valid until its rows are routed again.
        """
        weights = self._weights.layers[layer]
        rows = slice(0, len(x_TD)) if rows is None else rows
        for chunk in self._chunks(rows):
            frame, x_MD = self.scratch.frame(), x_TD[chunk]
            normed_MD = self._choices.normed_TD[chunk]
            self._residuals.norm(frame, x_MD, layer, self.shape.norm_of_mlps, normed_MD)
            normed_ND = self._products.bucketed(frame, normed_MD)
            if self._choices.latents_TL is not None:
                latents_NL = self._products.of_role(frame, normed_ND, weights, "latent_in")
                latents_ML = latents_NL[: len(x_MD)]
                if "latent_norm" in weights:
                    norm_L, eps = weights["latent_norm"], self.shape.rms_eps
                    self._elementwise.norm(frame, latents_ML, norm_L, eps)
                self._choices.latents_TL[chunk] = latents_ML
            if "router_norm" in weights:
                normed_ND = self._residuals.normed(frame, x_MD, layer, "router_norm")
            self._choices.choose(layer, chunk, frame, normed_ND)
        return self._choices.routing(layer, rows, len(x_TD))

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
            frame, normed_MD = self.scratch.frame(), routing.normed_TD[rows]
            parts: tuple[Tensor, ...] = (self._weighed(frame, layer, routing, rows),)
            if "latent_out" in weights:
                sum_NL = self._products.bucketed(frame, self._elementwise.sum(frame, *parts))
                sum_ND = self._products.of_role(frame, sum_NL, weights, "latent_out")
                parts = (sum_ND[: len(normed_MD)],)
            if self.shape.router.num_identities:
                same_MD = frame.take(*normed_MD.shape).copy_(normed_MD)
                parts += (same_MD.mul_(routing.identity_weights(rows)),)
            parts = self._residuals.made(frame, weights, "experts_out_norm", *parts)
            parts = self._residuals.kept(frame, rows, *parts)
            if self.shape.shared_expert:
                y_MD = self._shared_expert(frame, layer, x_TD[rows], normed_MD)
                parts += self._residuals.made(frame, weights, "shared_out_norm", y_MD)
            self._residuals.end(frame, layer, x_TD, rows, normed_MD, *parts)

    def _weighed(self, frame: Frame, layer: int, routing: Routing, rows: slice) -> Tensor:
        """What experts have made of rows, [M, K, D], weighed; normed before where each expert's
        is, which happens once."""
        outputs_MKD = routing.outputs_TKD[rows]
        if self.shape.norms_each_expert:
            norm_D = self._weights.layers[layer]["each_expert_norm"]
            for y_MD in outputs_MKD.unbind(1):
                self._residuals.norm_made(frame, y_MD, norm_D)
            outputs_MKD.mul_(routing.weights_TK[rows, :, None])
        return outputs_MKD

    def _shared_expert(self, frame: Frame, layer: int, x_MD: Tensor, normed_MD: Tensor) -> Tensor:
        weights, num_rows = self._weights.layers[layer], len(normed_MD)
        if "shared_norm" in weights:
            normed_ND = self._residuals.normed(frame, x_MD, layer, "shared_norm")
        else:
            normed_ND = self._products.bucketed(frame, normed_MD)
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
        operators = self._operators.clamping(self.shape.mlp_clamp(layer))
        return self._family.expert(frame, x_ND, num_rows, matrices, operators)

    def add_dense(self, layer: int, x_TD: Tensor, rows: slice | None = None) -> None:
        """Adds the MLP of a layer without experts, if it has one, to rows, in place; to all if
        None."""
        weights = self._weights.layers[layer]
        for chunk in self._chunks(slice(0, len(x_TD)) if rows is None else rows):
            frame, x_MD = self.scratch.frame(), x_TD[chunk]
            normed_ND, made, num_rows = x_MD, list[Tensor](), len(x_MD)
            if self.shape.has_mlp(layer):
                normed_ND = self._residuals.normed(frame, x_MD, layer, self.shape.norm_of_mlps)
                matrices = _mlp_weights(weights, "mlp", self.shape.dense)
                made.append(self._mlp(frame, layer, normed_ND, num_rows, matrices))
            self._residuals.end(frame, layer, x_TD, chunk, normed_ND[:num_rows], *made)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Logits [R, V] of the next token from the hidden states after all layers; the next block
        overwrites them."""
        weights = self._weights.globals
        frame = self.scratch.frame()
        normed = self._residuals.normed(frame, x_RD, None, "final_norm")
        head = weights.get("head", weights["embedding"])
        bias, room_NV = weights.get("head_bias"), self._logits_NV[: len(normed)]
        logits = self._products.linear(normed, head, bias, room_NV)[: len(x_RD)]
        scale = self.shape.logit_scale
        logits = logits if scale == 1 else logits.mul_(scale)
        cap = self.shape.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _chunks(self, *rows: slice) -> Iterator[slice]:
        """The rows in portions that the scratch has room for."""
        return chunks(self._limits.expert_rows, *rows)


def _mlp_weights(weights: Weights, prefix: str, mlp: Mlp | None) -> dict[str, Matrix]:
    assert mlp is not None, "the model has one"
    return {role: weights[f"{prefix}_{role}"] for role in mlp.tensors(1)}
