"""What a sampling parameter may be: the same checks for rows and for the job file.

Each check takes a value as JSON or YAML gave it and returns it in the form that `Sampling` holds.
It raises ValueError with what is allowed and what was found, ready to stand behind the name of
the parameter. True and false are never numbers. Ranges are those of the OpenAI API and vLLM.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeGuard

from moebatch.quoting import not_one_of, shown
from moebatch.spec.grammar import response_format, structured_outputs
from moebatch.spec.tools import ToolChoice, Tools, tool_choice, tools

MAX_CHOICES = 1024
"""Most sequences of one request: beyond it a typo is likelier than a wish."""
_ENDLESS = 2**63 - 1
"""Tokens that no answer has. Numbers of thousands of digits cannot be written into a message."""
_LARGEST_PENALTY = 1_000_000
MAX_LOGPROBS = 20
"""Most alternatives per token, as OpenAI allows."""


def whole(value: object, low: int, high: int | None = None) -> int:
    """A whole number within the bounds, which belong to it."""
    if _is_whole(value) and low <= value and (high is None or value <= high):
        return value
    reach = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise ValueError(f"must be a whole number {reach}, got {shown(value)}")


def number(value: object, low: float, high: float) -> float:
    """A finite number within the bounds, which belong to it."""
    if _is_number(value) and low <= value <= high:
        return float(value)
    raise ValueError(f"must be a number from {low:g} to {high:g}, got {shown(value)}")


def flag(value: object) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"must be true or false, got {shown(value)}")


def seed(value: object) -> int | None:
    """A 64-bit integer; -1 means none, as vLLM has it."""
    number_64_bit = whole(value, -(2**63), 2**63 - 1)
    return None if number_64_bit == -1 else number_64_bit


def stop(value: object) -> tuple[str, ...]:
    """A text or a list of texts, none of them empty."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
        if all(texts):
            return tuple(texts)
        raise ValueError("must not hold an empty text, which would end every answer at once")
    raise ValueError(f"must be a text or a list of texts, got {shown(value)}")


def token_ids(value: object) -> frozenset[int]:
    """A list of token ids; whether the model has them is checked where the model is known."""
    if isinstance(value, list | tuple | frozenset):
        return frozenset(_token_id(token) for token in value)
    raise ValueError(f"must be a list of token ids, got {shown(value)}")


def logit_bias(value: object) -> Mapping[int, float]:
    """A mapping of token ids, which JSON writes as text, to numbers from -100 to 100; null, with
    which tables fill what a row does not have, is none."""
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping of token ids to numbers, got {shown(value)}")
    biases = {}
    for key, bias in value.items():
        token = _token_id(int(key) if _is_id_text(key) else key)
        if bias is None:
            continue
        try:
            biases[token] = number(bias, -100, 100)
        except ValueError as error:
            raise ValueError(f"of token {token} {error}") from None
    return MappingProxyType(biases)


def _top_p(value: object) -> float:
    if _is_number(value) and 0 < value <= 1:
        return float(value)
    raise ValueError(f"must be a number above 0 and at most 1, got {shown(value)}")


def _top_k(value: object) -> int:
    try:
        return max(0, whole(value, -1))
    except ValueError:
        raise ValueError(
            f"must be a whole number of at least 1, or 0 or -1 for off, got {shown(value)}"
        ) from None


def _repetition_penalty(value: object) -> float:
    # The upper bound keeps huge integers, which no float holds, out of the engine.
    if _is_number(value) and 0 < value <= _LARGEST_PENALTY:
        return float(value)
    most = f"at most {_LARGEST_PENALTY:,}"
    raise ValueError(f"must be a number above 0 and {most}, 1 being off, got {shown(value)}")


def tokens_of_answer(value: object, low: int = 1) -> int:
    """How long an answer may be, or is at least to be; the context says how many there can be."""
    return min(whole(value, low), _ENDLESS)


CHECKS: Mapping[str, Callable[[object], object]] = {
    "max_tokens": tokens_of_answer,
    "temperature": partial(number, low=0, high=2),
    "top_p": _top_p,
    "top_k": _top_k,
    "min_p": partial(number, low=0, high=1),
    "n": partial(whole, low=1, high=MAX_CHOICES),
    "seed": seed,
    "stop": stop,
    "stop_token_ids": token_ids,
    "ignore_eos": flag,
    "min_tokens": partial(tokens_of_answer, low=0),
    "logprobs": partial(whole, low=0, high=MAX_LOGPROBS),
    "presence_penalty": partial(number, low=-2, high=2),
    "frequency_penalty": partial(number, low=-2, high=2),
    "repetition_penalty": _repetition_penalty,
    "logit_bias": logit_bias,
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    "tools": tools,
    "tool_choice": tool_choice,
    "parallel_tool_calls": flag,
}
"""One check for every field of `Sampling`."""


def contradictions(values: Mapping[str, object]) -> dict[str, str]:
    """What is wrong between values that are each allowed: name of a parameter to message.

    Values are those of `CHECKS`; what is missing or None contradicts nothing.
    """
    found = {}
    choices, temperature = values.get("n"), values.get("temperature")
    several = isinstance(choices, int) and choices > 1
    if several and isinstance(temperature, float) and temperature < 1e-5:
        found["n"] = (
            f"is {choices}, but temperature {temperature:g} always takes the likeliest token, "
            "so all answers would be the same; set n to 1 or temperature above 0"
        )
    fewest, most = values.get("min_tokens"), values.get("max_tokens")
    if isinstance(fewest, int) and isinstance(most, int) and fewest > most:
        found["min_tokens"] = f"is {fewest}, more than max_tokens, which is {most}"
    if values.get("response_format") and values.get("structured_outputs"):
        found["structured_outputs"] = "says what response_format says as well; give one of them"
    offered, choice = values.get("tools"), values.get("tool_choice")
    is_offered = isinstance(offered, Tools) and getattr(choice, "kind", "") != "none"
    held = next(
        (each for each in ("response_format", "structured_outputs") if values.get(each)), ""
    )
    if is_offered and held:
        found["tools"] = (
            f"may be called, but {held} leaves no room for a call; set tool_choice to none, or "
            f"leave {held} out"
        )
    if isinstance(offered, Tools) and isinstance(choice, ToolChoice) and choice.kind == "function":
        names = offered.parameters
        if choice.name not in names:
            found["tool_choice"] = f"names a function that {not_one_of(names, choice.name)}"
    return found


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _is_id_text(key: object) -> bool:
    return isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20


def _token_id(value: object) -> int:
    if _is_whole(value) and 0 <= value < 2**31:
        return value
    raise ValueError(f"must hold token ids, which are whole numbers from 0 up, got {shown(value)}")
