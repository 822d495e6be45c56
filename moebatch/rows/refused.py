"""How the checks of a row say no, and to which parameters of the OpenAI and vLLM interfaces.

An answer must never look as if a parameter had been honoured that was not. So a parameter is
either implemented, harmless, given with the value that asks for nothing, or refused by name.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from moebatch.quoting import shown
from moebatch.spec.request import RowError

T = TypeVar("T")


class RowRefused(Exception):
    """A row cannot be computed as it is. Never leaves this room: it becomes a row of errors."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = RowError(status=400, code=code, message=message, param=param)


def wrong(param: str, message: str) -> RowRefused:
    """A parameter has a value that is not allowed; the message continues its name, or the place of
    a part, such as ``[0].name``."""
    of_part = message.startswith("[")
    return RowRefused(
        f"{param}{message}" if of_part else f"{param} {message}", code="invalid_value", param=param
    )


def checked(check: Callable[[object], T], param: str, value: object) -> T:
    """What a check makes of a value. Raises RowRefused where it raises ValueError."""
    try:
        return check(value)
    except ValueError as error:
        raise wrong(param, str(error)) from None


def missing(param: str, message: str) -> RowRefused:
    """A parameter is needed and not there; the message continues its name."""
    return RowRefused(f"{param} {message}", code="missing_required_parameter", param=param)


def unsupported(param: str, message: str) -> RowRefused:
    """A parameter asks for what is not implemented; the message continues its name."""
    return RowRefused(f"{param} {message}", code="unsupported_parameter", param=param)


def without_null(content: Mapping[str, object]) -> dict[str, object]:
    """What is said, since tables fill with null what a row does not have."""
    return {key: value for key, value in content.items() if value is not None}


HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "priority",
        "request_id",
    }
)
"""Bookkeeping that no answer depends on."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "echo": (False,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "modalities": (["text"],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True, False),
    "continue_final_message": (False,),
}
"""Values that ask for nothing. Any other value is refused, and so is any other parameter."""

TEMPLATE_KEYS = frozenset(
    {"chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
)
"""Parameters of messages, which are understood with these; of any other prompt they ask in vain."""

IN_TEMPLATES = frozenset({"reasoning_effort", "verbosity"})
"""Parameters of the API that some chat templates know as variables."""


def refuse_unless_neutral(name: str, value: object) -> None:
    """Raises RowRefused unless a parameter that is not implemented asks for nothing anyway."""
    if value is None or name in HARMLESS:
        return
    allowed = NEUTRAL.get(name, ())
    asked = without_null(value) if isinstance(value, Mapping) else value
    if any(type(asked) is type(neutral) and asked == neutral for neutral in allowed):
        return
    if name in TEMPLATE_KEYS:
        given = "the prompt goes to the model unchanged; input.chat makes one of a plain row"
        raise unsupported(name, f"is for messages, but {given}, got {shown(value)}")
    hint = "" if name in NEUTRAL else "; moebatch has no such parameter"
    if allowed:
        hint = f"; allowed is {' or '.join(map(shown, allowed))}"
    elif name in IN_TEMPLATES:
        hint = "; where the model's chat template knows it, chat_template_kwargs may set it"
    raise unsupported(name, f"is not supported, got {shown(value)}{hint}")
