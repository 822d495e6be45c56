"""Markers of reasoning that the vocabulary of a model has."""

from typing import Any

from moebatch.spec.reasoning import Reasoning

_PAIRS = (
    ("<think>", "</think>", ""),
    ("[THINK]", "[/THINK]", ""),
    ("<|channel>", "<channel|>", "thought\n"),
    ("<longcat_think>", "</longcat_think>", ""),
    ("<seed:think>", "</seed:think>", ""),
)
"""Those of most models, of Mistral, Gemma 4, LongCat-Flash and Seed: what opens and what closes a
thought, and the text with which it begins."""
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
"""Of gpt-oss, whose messages have headers: all are thought but for those of one channel."""
_ANSWERS = "final"


def reasoning_of(tokenizer: Any) -> Reasoning | None:
    """How a model with this tokenizer of transformers marks what it thinks; None if it has no
    tokens for that."""

    def find(text: str) -> int | None:
        token = tokenizer.convert_tokens_to_ids(text)
        known = isinstance(token, int) and tokenizer.convert_ids_to_tokens(token) == text
        return token if known else None

    start, channel, message = map(find, (_START, _CHANNEL, _MESSAGE))
    if start is not None and channel is not None and message is not None:
        name = tokenizer(_ANSWERS, add_special_tokens=False)["input_ids"]
        headers = {start: message, channel: message}
        return Reasoning(headers=headers, closes=(channel, *name))
    for opens, closes, label in _PAIRS:
        first, last = find(opens), find(closes)
        if first is not None and last is not None:
            return Reasoning(headers={first: first}, closes=(last,), label=label)
    return None
