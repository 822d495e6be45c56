"""What keys and values in 8 bits cost: the perplexity of the built-in model, by transformers with
keys and values rounded as jobs round them, which is what the tests hold jobs against.

    python -m tests.benchmarks.cached_numbers [--text FILE]

Also the error of keys and values themselves, as a share of their norm, where a scale is for a token
and head, and where it is for a channel of a page.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import AutoTokenizer

from demo.tasks import solve
from moebatch.model.attention.cached_numbers import decode, encode
from moebatch.spec.model.cache_layout import CacheDtype
from moebatch.spec.policy.policy import PAGE_TOKENS
from tests.model.oracle import load, rounding_cache

_ROOT = Path(__file__).parents[2]
_MODEL, _ROWS = _ROOT / "demo" / "model", _ROOT / "jobs" / "demo.jsonl"
_TEXT_TOKENS = 512
Rounded = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.cached_numbers")
    parser.add_argument("--text", type=Path, default=_ROOT / "docs" / "concepts.md")
    tokenizer, model = AutoTokenizer.from_pretrained(_MODEL), load(_MODEL)
    answers = list(_answers(tokenizer))
    text = tokenizer(parser.parse_args().text.read_text())["input_ids"]
    chunks = [(text[i : i + _TEXT_TOKENS], 1) for i in range(0, len(text), _TEXT_TOKENS)]
    ways: dict[str, Rounded] = {"full": lambda x: x}
    ways |= {dtype: _in_bits(dtype) for dtype in get_args(CacheDtype)}
    ways["int8 by channel of a page"] = _by_channel
    print("| keys and values | perplexity of answers | of a text | error of keys, of values |")
    print("| --- | --- | --- | --- |")
    for name, rounded in ways.items():
        of_answers, of_text = (_perplexity(model, part, rounded) for part in (answers, chunks))
        keys, values = _errors(model, chunks[0][0], rounded)
        print(
            f"| {name} | {of_answers:.5f} | {of_text:.3f} | {keys:.3%}, {values:.3%} |", flush=True
        )


def _answers(tokenizer: Any) -> Iterator[tuple[list[int], int]]:
    """Conversations of the demo with the right answers, and where these begin."""
    for line in _ROWS.read_text().splitlines():
        messages = json.loads(line)["body"]["messages"]
        asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        answer = tokenizer(solve(messages[-1]["content"]).answer, add_special_tokens=False)[
            "input_ids"
        ]
        yield [*asked, *answer, tokenizer.eos_token_id], len(asked)


def _perplexity(model: Any, texts: Sequence[tuple[list[int], int]], rounded: Rounded) -> float:
    """Of each text from a token on."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for tokens, first in texts:
            if len(tokens) <= first:
                continue
            cache = rounding_cache(rounded)
            logits_TV = model(torch.tensor([tokens]), past_key_values=cache).logits[0].double()
            chosen = torch.tensor(tokens[first:])
            loss = torch.nn.functional.cross_entropy(
                logits_TV[first - 1 : -1], chosen, reduction="sum"
            )
            total, count = total + float(loss), count + len(chosen)
    return float(torch.tensor(total / count).exp())


def _errors(model: Any, tokens: list[int], rounded: Rounded) -> tuple[float, float]:
    """Of keys and of values, over all layers."""
    cache = rounding_cache(lambda x: x)
    with torch.inference_mode():
        model(torch.tensor([tokens]), past_key_values=cache)
    shares = []
    for part in ("keys", "values"):
        exact = torch.stack([getattr(layer, part) for layer in cache.layers])
        rough = torch.stack([rounded(getattr(layer, part)) for layer in cache.layers])
        shares.append(float((rough - exact).norm() / exact.norm()))
    return shares[0], shares[1]


def _in_bits(dtype: CacheDtype) -> Rounded:
    return lambda x: decode(encode(x, dtype), dtype, torch.empty_like(x))


def _by_channel(x_BGSC: Tensor) -> Tensor:
    """In int8 with a scale for each channel of a page."""
    pages = x_BGSC.split(PAGE_TOKENS, dim=2)
    scales = [page.abs().amax(2, keepdim=True).clamp(min=1e-30) / 127 for page in pages]
    rounded = [(page / s).round() * s for page, s in zip(pages, scales, strict=True)]
    return torch.cat(rounded, dim=2)


if __name__ == "__main__":
    main()
