"""A made-up recurrent layer, to hold states: fading sums, and what the last token was."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.model.batch import MicroBatch, Span
from moebatch.model.decoder import Decoder
from moebatch.spec.attention import CacheLayout, CachePart
from moebatch.spec.cache import Recurrence

FADING = 0.9


class Sums:
    """Of the tiny models, whose hidden states have 32 numbers: sums in float32, as two heads, and
    the input of the last token in the compute dtype."""

    state = CacheLayout((CachePart("sums", 2, 16, "float32"), CachePart("last input", 1, 32)))


SUMS: Recurrence = Sums()


def recurring(files: ModelFiles, layers: tuple[int, ...]) -> ModelFiles:
    """The same model with sums in the place of attention in some layers."""
    return replace(files, shape=replace(files.shape, recurrence=SUMS, recurrent_layers=layers))


def following(inputs_TD: Tensor, sums_D: Tensor, last_D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What tokens of a sequence put out behind a state, and the state that they leave."""
    outputs = []
    for input_D in inputs_TD:
        sums_D = FADING * sums_D + input_D
        outputs.append(torch.tanh(sums_D) - 0.5 * last_D)
        last_D = input_D
    return torch.stack(outputs), sums_D, last_D


class SumsOfAll(nn.Module):
    """In the place of attention in a model of transformers, which computes all tokens each time."""

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        zeros = hidden_states.new_zeros(hidden_states.shape[-1])
        return following(hidden_states[0], zeros, zeros)[0][None], None


def greedy_without_cache(model: Any, prompt: Sequence[int], num_new: int) -> tuple[int, ...]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_new):
            logits_V = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits_V.argmax()))
    return tuple(tokens[len(prompt) :])


def with_sums(model: Any, layers: Sequence[int]) -> Any:
    for layer in layers:
        model.model.layers[layer].self_attn = SumsOfAll()
    return model


def patch_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders then compute sums in recurrent layers, by rows and states that they are given."""
    attend, micro_batch = Decoder.attend, Decoder.micro_batch
    spans_of: dict[int, tuple[MicroBatch, Sequence[Span]]] = {}

    def remembering(self: Decoder, spans: Sequence[Span], **options: Any) -> MicroBatch:
        made = micro_batch(self, spans, **options)
        spans_of[id(made)] = made, spans
        return made

    def recurring_or_attending(
        self: Decoder, layer: int, x_TD: Tensor, micro: MicroBatch, *cached: Any
    ) -> None:
        if layer not in self.shape.recurrent_layers:
            attend(self, layer, x_TD, micro, *cached)
            return
        sums_RGC, last_RGC = cached if isinstance(cached[0], Tensor) else cached[0]
        x = x_TD[micro.start : micro.stop]
        weights = self._weights.layers[layer]
        normed_TD = self._normed(self.scratch.frame(), x, weights, "input_norm")[: len(x)].clone()
        for span in spans_of[id(micro)][1]:
            sums_D, last_D = (part[span.state_row].view(-1) for part in (sums_RGC, last_RGC))
            rows = slice(span.start - micro.start, span.start - micro.start + span.num_tokens)
            if not span.num_before:  # what another one has left
                sums_D.zero_()
                last_D.zero_()
            out_TD, *new = following(normed_TD[rows], sums_D, last_D)
            x[rows] += out_TD
            sums_D.copy_(new[0])
            last_D.copy_(new[1])

    monkeypatch.setattr(Decoder, "micro_batch", remembering)
    monkeypatch.setattr(Decoder, "attend", recurring_or_attending)
