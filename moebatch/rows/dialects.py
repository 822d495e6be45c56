"""Outcomes as result lines: batch results as OpenAI writes them, or the row with its answer.

Lines depend on nothing but row, outcome and `Served`, so that a job run again writes the same
bytes. A failed batch line says so twice, as an HTTP status with a body and at the top level,
because some readers look at one and some at the other.

A plain result is the row unchanged plus one key, ``response`` by default::

    {"prompt": …, "response": {"custom_id": "1", "text": …, "finish_reason": "stop",
                               "stop_reason": null, "usage": {…}, "error": null}}

With ``n`` above 1, text, finish_reason, stop_reason and logprobs are lists. What a model thinks
before it answers, where it marks that, is ``reasoning_content`` and no part of the text. Nor are
calls of tools, which are ``tool_calls``; the text is null where it is nothing but calls.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Literal, NamedTuple

from moebatch.rows.row import Dialect, Row
from moebatch.rows.tool_calls import Call, CallReader
from moebatch.spec.request import Choice, Outcome, Request, RowError

Line = dict[str, Any]
TokenText = Callable[[int], bytes]
"""Bytes that a token stands for."""
Decode = Callable[[Sequence[int]], str]
"""Text of tokens, without special ones; U+FFFD where bytes are no character."""
_REASONING = "reasoning_content"
"""Key of what a model has thought, as DeepSeek's interface, SGLang and transformers have it."""
_CALLS = "tool_calls"
_LEAST = -9999.0
"""Stands for an impossible token, as in vLLM, since JSON has no infinity."""
_REPLACEMENT = "\ufffd"
_MOST_PENDING = 8
"""So many tokens are never one character."""
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What every result line of a run has in common."""

    model: str
    """Name of the model where the row gave none."""
    token_bytes: TokenText
    """Bytes of a token, for log-probabilities."""
    decode: Decode
    """Text of an answer's tokens, for where each of them begins in it."""
    fingerprint: str | None = None
    """Stands for everything that may change numbers: model, quantisation, plan."""
    created: int = 0
    """Unix time of all answers of a job, whenever they are computed."""
    format: Literal["auto", "openai", "plain"] = "auto"
    """auto writes each row in its own dialect."""
    fallback: Dialect = "openai"
    """Dialect of rows that could not be read."""
    column: str = "response"
    """Key of the answer in a plain result."""
    splits_reasoning: bool = True
    """What a model thinks before it answers is kept apart from the answer."""
    calls: CallReader | None = None
    """Keeps calls of tools apart from the text; None leaves them there."""

    def splits(self, request: Request) -> bool:
        """Whether that of a request is, since the model marks it."""
        return self.splits_reasoning and request.reasoning is not None


def result_line(row: Row, result: Outcome | RowError, served: Served) -> bytes:
    """One line of the output, without its newline: UTF-8, never NaN or infinity."""
    if isinstance(result, Outcome) and result.error is not None:
        result = result.error
    dialect = row.dialect or served.fallback if served.format == "auto" else served.format
    make = _batch_line if dialect == "openai" else _plain_line
    text = json.dumps(
        make(row, result, served), allow_nan=False, ensure_ascii=False, separators=(",", ":")
    )
    # Half of a surrogate pair has no UTF-8; JSON can write it, in a text, where it must be.
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text).encode()


def _batch_line(row: Row, result: Outcome | RowError, served: Served) -> Line:
    name = stable_id(row)
    if isinstance(result, RowError):
        status, body = result.status, {"error": _error_body(row, result)}
        error = {"code": result.code, "message": body["error"]["message"]}
    else:
        status, body, error = 200, _Answer(row, result, served).body(), None
    return {
        "id": f"batch_req_{name}",
        "custom_id": row.custom_id,
        "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
        "error": error,
    }


def _plain_line(row: Row, result: Outcome | RowError, served: Served) -> Line:
    columns: Line = json.loads(row.columns) if row.columns else {"custom_id": row.custom_id}
    if isinstance(result, RowError):
        answer = _plain_error(row, result)
    else:
        answer = _Answer(row, result, served).column()
    return {**columns, served.column: {"custom_id": row.custom_id, **answer}}


def _plain_error(row: Row, error: RowError) -> Line:
    nothing = dict.fromkeys(("text", "finish_reason", "stop_reason", "usage"))
    details = {"status": error.status, "line": row.line, **_error_body(row, error)}
    return {**nothing, "error": details}


def _error_body(row: Row, error: RowError) -> dict[str, Any]:
    # Without a custom_id only its place tells which row it was.
    place = "" if row.custom_id is not None else f"{row.place}: "
    return {
        "message": place + error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }


def stable_id(row: Row) -> str:
    """Same row, same id, in every run."""
    return _hash(f"{row.index}:{row.custom_id}")


def _hash(key: str) -> str:
    return hashlib.blake2b(key.encode("utf-8"), digest_size=12).hexdigest()


class _Text(NamedTuple):
    answer: str | None
    """None where there is nothing but calls."""
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()

    def finish_reason(self, choice: Choice) -> str:
        ended_by_calls = self.calls and choice.finish_reason == "stop"
        return "tool_calls" if ended_by_calls else choice.finish_reason


class _Answer:
    """All choices of a row, in either dialect."""

    def __init__(self, row: Row, outcome: Outcome, served: Served) -> None:
        self._row, self._outcome, self._served = row, outcome, served
        self._name, self._request = stable_id(row), outcome.request
        self._splits = served.splits(outcome.request)

    def body(self) -> Line:
        """As OpenAI has it."""
        row, served = self._row, self._served
        chat = row.kind == "chat"
        return {
            "id": ("chatcmpl-" if chat else "cmpl-") + self._name,
            "object": "chat.completion" if chat else "text_completion",
            "created": served.created,
            "model": row.model if row.model is not None else served.model,
            "choices": [*map(self._choice, self._outcome.choices)],
            "usage": self._usage(),
            "system_fingerprint": served.fingerprint,
        }

    def column(self) -> Line:
        """As one column of a plain result."""
        choices, request, served = self._outcome.choices, self._request, self._served
        texts = [self._text(choice) for choice in choices]
        fields: dict[str, list[Any]] = {
            "text": [text.answer for text in texts],
            "finish_reason": [*map(_Text.finish_reason, texts, choices)],
            "stop_reason": [choice.stop_reason for choice in choices],
        }
        if request.sampling.logprobs is not None:
            fields["logprobs"] = [_chat_logprobs(choice, served.token_bytes) for choice in choices]
        if self._splits:
            fields[_REASONING] = [text.reasoning for text in texts]
        if served.calls is not None and request.sampling.offered is not None:
            listed = (self._listed(text.calls, place) for place, text in enumerate(texts))
            fields[_CALLS] = [calls or None for calls in listed]
        several = request.sampling.n > 1
        answer = {name: values if several else values[0] for name, values in fields.items()}
        return {**answer, "usage": self._usage(), "error": None}

    def _choice(self, choice: Choice) -> Line:
        text, served = self._text(choice), self._served
        if self._row.kind == "chat":
            said: Line = {"message": self._message(text, choice.index)}
            logprobs = _chat_logprobs(choice, served.token_bytes)
        else:
            said, logprobs = {"text": text.answer}, _completion_logprobs(choice, served)
        return {
            "index": choice.index,
            **said,
            "logprobs": logprobs,
            "finish_reason": text.finish_reason(choice),
            "stop_reason": choice.stop_reason,
        }

    def _message(self, text: _Text, index: int) -> Line:
        message: Line = {"role": "assistant", "content": text.answer}
        if self._splits:
            message[_REASONING] = text.reasoning
        if text.calls:
            message[_CALLS] = self._listed(text.calls, index)
        return {**message, "refusal": None}

    def _listed(self, calls: Sequence[Call], index: int) -> list[Line]:
        """Ids that models do not give have nine letters, as Mistral's templates want them, and are
        the same in every run."""
        return [
            {
                "id": call.id or _hash(f"{self._name}:{index}:{place}")[:9],
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(calls)
        ]

    def _text(self, choice: Choice) -> _Text:
        """What a choice says, what was thought before, and what it calls."""
        text, request = self._without_thought(choice), self._request
        if self._served.calls is None:
            return text
        found = self._served.calls.read(choice, request, with_thought=not self._splits)
        if found is None:
            return text
        if not found.calls:
            return text._replace(answer=found.text.lstrip("\n"))
        calls = found.calls if request.sampling.parallel_tool_calls else found.calls[:1]
        return text._replace(answer=found.text.strip() or None, calls=calls)

    def _without_thought(self, choice: Choice) -> _Text:
        """What a choice says, and what was thought before. Line feeds between them belong to
        neither, and a stop text cuts off the end of either."""
        said, decode, marks = choice.said, self._served.decode, self._request.reasoning
        thought = self._request.thought(said) if self._splits else None
        if thought is None or marks is None:
            return _Text(choice.text)
        answer = "" if thought.end is None else decode(said[thought.end :])
        num_cut = len(decode(said)) - len(choice.text)
        answer, left = answer[: max(0, len(answer) - num_cut)], max(0, num_cut - len(answer))
        reasoning = decode(thought.tokens).removeprefix(marks.label)
        reasoning = reasoning[: max(0, len(reasoning) - left)].strip("\n")
        return _Text(answer.lstrip("\n"), reasoning or None)

    def _usage(self) -> Line:
        choices, num_prompt = self._outcome.choices, len(self._request.prompt_tokens)
        num_new = sum(len(choice.tokens) for choice in choices)
        usage: Line = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }
        if self._request.reasoning is not None:
            num_thought = sum(map(self._num_thought, choices))
            usage["completion_tokens_details"] = {"reasoning_tokens": num_thought}
        return usage

    def _num_thought(self, choice: Choice) -> int:
        """Tokens before the answer, markers included."""
        thought = self._request.thought(choice.tokens)
        if thought is None:
            return 0
        return len(choice.tokens) if thought.end is None else thought.end


# --- log-probabilities in the two forms of OpenAI, of chats and of completions -------------------


def _chat_logprobs(choice: Choice, token_bytes: TokenText) -> dict[str, Any] | None:
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


def _completion_logprobs(choice: Choice, served: Served) -> dict[str, Any] | None:
    """``{tokens, token_logprobs, top_logprobs, text_offset}``, None if not asked for."""
    if choice.logprobs is None:
        return None
    token_bytes, tokens = served.token_bytes, [at.token for at in choice.logprobs]
    return {
        "tokens": [_name(token_bytes(token)) for token in tokens],
        "token_logprobs": [_finite(at.logprob) for at in choice.logprobs],
        "top_logprobs": [_named(at.top, token_bytes) for at in choice.logprobs],
        "text_offset": _offsets(tokens, served.decode),
    }


def _offsets(tokens: Sequence[int], decode: Decode) -> list[int]:
    """How many characters of their text are before each of some tokens. Those that make up one
    character begin where it does; special tokens have no text.

    Tokens are decoded behind others, since tokenizers treat the beginning of a text differently
    from its middle: some leave a space out there.
    """
    offsets, num_behind = [], 0
    anchor, anchor_text, pending, before = list[int](), "", list[int](), ""
    for token in tokens:
        pending.append(token)
        text = decode(anchor + pending)[len(anchor_text) :]
        # Bytes at the end may still become a character, together with those of the next tokens.
        whole = text.rstrip(_REPLACEMENT)
        offsets.append(num_behind + len(commonprefix((before, whole))))
        before = text
        if text and (whole == text or len(pending) >= _MOST_PENDING):
            num_behind += len(text)
            anchor, anchor_text = pending, decode(pending)
            pending, before = [], ""
        elif len(pending) >= _MOST_PENDING:
            pending = pending[-1:]  # the others had no text; this may be the space at the beginning
    return offsets


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
