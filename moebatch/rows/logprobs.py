"""Log-probabilities in OpenAI's two forms, of chats and of completions."""

import codecs
import math
from collections.abc import Callable, Mapping
from typing import Any

from moebatch.spec.request import Choice

TokenText = Callable[[int], bytes]
"""Bytes that a token stands for."""
_LEAST = -9999.0
"""Stands for an impossible token, as in vLLM, since JSON has no infinity."""


def chat_logprobs(choice: Choice, token_bytes: TokenText) -> dict[str, Any] | None:
    """``{"content": [{token, logprob, bytes, top_logprobs}]}``, None if not asked for."""
    if choice.logprobs is None:
        return None
    return {
        "content": [
            {
                **_entry(token_bytes(at.token), at.logprob),
                "top_logprobs": [_entry(token_bytes(token), at.top[token]) for token in at.top],
            }
            for at in choice.logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(choice: Choice, token_bytes: TokenText) -> dict[str, Any] | None:
    """``{tokens, token_logprobs, top_logprobs, text_offset}``, None if not asked for."""
    if choice.logprobs is None:
        return None
    decoder, offset, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
    for at in choice.logprobs:
        offsets.append(offset)
        offset += len(decoder.decode(token_bytes(at.token)))
    return {
        "tokens": [_name(token_bytes(at.token)) for at in choice.logprobs],
        "token_logprobs": [_finite(at.logprob) for at in choice.logprobs],
        "top_logprobs": [_named(at.top, token_bytes) for at in choice.logprobs],
        "text_offset": offsets,
    }


def _entry(data: bytes, logprob: float) -> dict[str, Any]:
    token = data.decode("utf-8", "replace")
    return {"token": token, "logprob": _finite(logprob), "bytes": list(data)}


def _named(top: Mapping[int, float], token_bytes: TokenText) -> dict[str, float]:
    named: dict[str, float] = {}
    for token, logprob in top.items():
        # Likeliest first: of tokens that look the same the likeliest stays.
        named.setdefault(_name(token_bytes(token)), _finite(logprob))
    return named


def _name(data: bytes) -> str:
    """The text of a token, or ``bytes:\\xe2\\x96`` for a piece of a character."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
