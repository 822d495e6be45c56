"""Request parameters become sampling: row over job over model over library."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from moebatch.quoting import shown
from moebatch.rows.refused import RowRefused, checked, refuse_unless_neutral, wrong
from moebatch.rows.row import ParsedRow, Row
from moebatch.spec.files.limits import (
    CHECKS,
    MAX_LOGPROBS,
    contradictions,
    flag,
    tokens_of_answer,
    whole,
)
from moebatch.spec.job import SamplingSection
from moebatch.spec.sampling import Sampling

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of generation_config.json that are defaults, as in vLLM, and what we call them."""
_OWN_RULES = frozenset({"max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """Parameters of rows that do not say otherwise: job over model."""

    values: Mapping[str, Any]
    """By their names in `Sampling`; what is missing has the library's default."""
    vocab_size: int

    @property
    def sampling(self) -> Sampling:
        """What a row gets that says nothing."""
        return Sampling(**self.values)

    def resolve(self, parsed: ParsedRow) -> Sampling:
        """Sampling of one row. Raises RowRefused."""
        given = _checked(parsed.parameters, parsed.row)
        _in_vocabulary(given, self.vocab_size)
        values = {**self.values, **given}
        for name, message in contradictions(_with_library(values)).items():
            raise wrong(name, message)
        return Sampling(**values)


def merge_defaults(
    job: SamplingSection, generation_config: Mapping[str, object], *, vocab_size: int
) -> Defaults:
    """Defaults of a job on a model.

    Like vLLM it takes numbers from generation_config.json and ignores its do_sample. Raises
    RowRefused where the job names tokens that the model does not have, where the job's own values
    do not go with those of the model, and as `model_defaults` does.
    """
    model = model_defaults(generation_config)
    own = job.defaults()
    _in_vocabulary(own, vocab_size)
    values = {**model, **own}
    for name, message in contradictions(_with_library(values)).items():
        # Only what the job says can be wrong for all rows; the rest may be put right by each row.
        if name in own:
            raise wrong(name, message)
    return Defaults(values=values, vocab_size=vocab_size)


def model_defaults(generation_config: Mapping[str, object]) -> dict[str, object]:
    """What a model says about sampling, under our names. Raises RowRefused."""
    values: dict[str, object] = {}
    for theirs, ours in _NAMES.items():
        value = generation_config.get(theirs)
        if value is None:
            continue
        try:
            values[ours] = CHECKS[ours](value)
        except ValueError as error:
            message = (
                f"generation_config.json of the model has a {theirs} that cannot be used: it "
                f"{error}; set sampling.{ours} in the job file and remove it there"
            )
            raise RowRefused(message, code="invalid_value", param=ours) from None
    return values


def _checked(parameters: Mapping[str, object], row: Row) -> dict[str, object]:
    """The row's own parameters in the form of `Sampling`."""
    given: dict[str, object] = {}
    for name, value in parameters.items():
        if value is None or name in _OWN_RULES:
            continue
        if name not in CHECKS:
            refuse_unless_neutral(name, value)
            continue
        given[name] = checked(CHECKS[name], name, value)
    _check_limit(parameters, given)
    _check_logprobs(parameters, row, given)
    return given


def _check_limit(parameters: Mapping[str, object], given: dict[str, object]) -> None:
    """``max_completion_tokens`` is OpenAI's newer name of ``max_tokens``."""
    for name in ("max_tokens", "max_completion_tokens"):
        value = parameters.get(name)
        if value is None:
            continue
        limit = checked(tokens_of_answer, name, value)
        if given.setdefault("max_tokens", limit) != limit:
            raise wrong(name, f"is {limit}, but max_tokens is {given['max_tokens']}; give one")


def _check_logprobs(parameters: Mapping[str, object], row: Row, given: dict[str, object]) -> None:
    """Chats say ``logprobs: true, top_logprobs: 5``, completions ``logprobs: 5``; plain rows
    may use either."""
    value, top = parameters.get("logprobs"), parameters.get("top_logprobs")
    as_chat = row.dialect == "plain" or row.kind == "chat"
    as_completion = row.dialect == "plain" or row.kind == "completion"
    if value is not None and not (isinstance(value, bool) and as_chat):
        if not as_completion:
            checked(flag, "logprobs", value)
        given["logprobs"] = checked(CHECKS["logprobs"], "logprobs", value)
    if isinstance(value, bool):
        given["logprobs"] = 0 if value else None
    if top is None:
        return
    if not as_chat:
        raise wrong("top_logprobs", "is for chats; a completion takes a number as logprobs")
    most = checked(partial(whole, low=0, high=MAX_LOGPROBS), "top_logprobs", top)
    if most and value is not True:
        raise wrong("top_logprobs", f"is {most} without logprobs: true, got {shown(value)}")
    if value is True:
        given["logprobs"] = most


def _in_vocabulary(values: Mapping[str, object], vocab_size: int) -> None:
    for name in ("stop_token_ids", "logit_bias"):
        tokens = values.get(name)
        if isinstance(tokens, Iterable):
            require_tokens(name, sorted(tokens), vocab_size)


def require_tokens(param: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Raises RowRefused that names the first of these tokens which the model does not have."""
    beyond = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if beyond is not None:
        has = f"the model has {vocab_size} tokens, 0 to {vocab_size - 1}"
        raise wrong(param, f"holds the token id {beyond}, but {has}")


def _with_library(values: Mapping[str, object]) -> dict[str, object]:
    library = Sampling()
    return {name: values.get(name, getattr(library, name)) for name in CHECKS}
