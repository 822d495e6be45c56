"""What transformers' models say where tokens see sinks and a window, in plain torch and without a
cache: at every token all keys that it sees are rotated anew, to their places among these.

Shape letters: B sequences, H query heads, G KV heads, S positions, C head size.
"""

import copy
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moebatch.spec.model.cache_layout import SinkWindow

_NAME = "sinks_of_tests"


def seen(position: int, sink_window: SinkWindow, own: int | None = None) -> list[int]:
    """Positions that a token sees, by the words of the paper; `own` is the window of a layer."""
    window = sink_window.window
    if own is not None and own < window:
        return list(range(max(0, position + 1 - own), position + 1))
    first = range(min(sink_window.sinks, position + 1))
    last = range(max(0, position + 1 - window), position + 1)
    return sorted({*first, *last})


def greedy_with_sinks(
    model: Any,
    prompt: Sequence[int],
    num_new: int,
    sink_window: SinkWindow,
    *,
    rounded: Callable[[Tensor], Tensor] | None = None,
) -> tuple[list[int], Tensor]:
    """The next `num_new` tokens and the logits [num_new, V] from which they come. Keys, as they are
    rotated to their positions, and values may be `rounded`."""
    tokens, logits = list(prompt), []
    for _ in range(num_new):
        logits.append(logits_with_sinks(model, tokens, sink_window, rounded)[-1])
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(logits)


def logits_with_sinks(
    model: Any,
    tokens: Sequence[int],
    sink_window: SinkWindow,
    rounded: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Logits [S, V] after every token."""
    from transformers import AttentionInterface

    fresh = copy.deepcopy(model)
    module = importlib.import_module(type(model).__module__)
    rotate = module.apply_rotary_pos_emb
    rotary = fresh.base_model.rotary_emb

    def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        if rounded is not None:
            places = torch.arange(k.shape[2])[None]
            k, v = rounded(rotate(k, k, *rotary(v, places))[1]), rounded(v)
            k = rotate(k, k, *rotary(v, -places))[1] / rotary.attention_scaling**2
        q_HSC, k_GSC, v_GSC = q[0], k[0], v[0]
        num_shared = len(q_HSC) // len(k_GSC)
        k_HSC, v_HSC = (x.repeat_interleave(num_shared, 0) for x in (k_GSC, v_GSC))
        out = torch.empty_like(q_HSC)
        for position in range(q_HSC.shape[1]):
            rows = seen(position, sink_window, options.get("sliding_window"))
            cos, sin = rotary(v, torch.arange(len(rows))[None])
            query = q_HSC[None, :, position : position + 1].expand(-1, -1, len(rows), -1)
            query, keys = rotate(query, k_HSC[None, :, rows], cos, sin)
            scores = query[0, :, -1:] @ keys[0].mT * layer.scaling
            beside = options.get("s_aux")  # of gpt-oss: scores without a value
            if beside is not None:
                scores = torch.cat([scores, beside[:, None, None]], -1)
            weights = scores.softmax(-1)[..., : len(rows)]
            out[:, position] = (weights @ v_HSC[:, rows])[:, 0]
        return out.transpose(0, 1)[None], None

    AttentionInterface.register(_NAME, attend)
    fresh.config._attn_implementation = _NAME
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin, *_, **__: (q, k))
        return fresh(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
