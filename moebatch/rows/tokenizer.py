"""The tokenizer of a model folder: text to tokens, messages to tokens, and the way back."""

import datetime
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moebatch.errors import CheckpointError, ConfigError, Fault
from moebatch.rows.refused import RowRefused, unsupported, wrong
from moebatch.rows.row import Chat
from moebatch.rows.strict_json import parse
from moebatch.rows.token_bytes import TokenBytes
from moebatch.spec.limits import shown

NO_CHAT_TEMPLATE = "no_chat_template"
"""Code of rows with messages on a model without a template: a fault of the model, not of rows."""
_DATE = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


class Tokenizer:
    """Text and messages to token ids, and back."""

    def __init__(self, tokenizer: Any, *, folder: Path, template: str | None) -> None:
        """Raises CheckpointError if the chat template has a syntax error."""
        self._tokenizer = tokenizer
        self._folder = folder
        self._template = template
        reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._reserved = reserved | {"messages", "raise_exception", "strftime_now"}
        self._bytes = TokenBytes(tokenizer)
        if template is not None:
            self._refuse_broken_template()

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded."""
        return self._template is not None

    @property
    def end_token(self) -> int | None:
        """The end token by the tokenizer's own account."""
        token = self._tokenizer.eos_token_id
        return token if isinstance(token, int) else None

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, with the begin token if the model wants one."""
        return tuple(self._tokenizer(text, verbose=False)["input_ids"])

    def encode_chat(self, chat: Chat, variables: Mapping[str, object]) -> tuple[int, ...]:
        """Tokens of a conversation; `variables` of the job give way to those of the chat.

        Raises RowRefused if the template does not take the messages.
        """
        if self._template is None:
            message = "messages need a chat template, and the tokenizer of the model has none"
            raise RowRefused(message, code=NO_CHAT_TEMPLATE, param="messages")
        own = {**variables, **chat.variables}
        for name in own.keys() & self._reserved:
            raise wrong("chat_template_kwargs", f"may not set {name}")
        place = _first_with_tools(chat)
        try:
            text = self._render(chat, own) if place is None else self._render_tools(chat, own)
        except Exception as error:  # A template is a program: it may raise anything.
            if place is not None:
                raise _no_tools(place, f"does not take: {_reason(error)}") from None
            message = f"messages do not fit the model's chat template: {_reason(error)}"
            raise RowRefused(message, code="invalid_value", param="messages") from None
        if place is not None and self._leaves_calls_out(chat, own, text):
            raise _no_tools(place, "leaves out")
        # The template has written the begin token already.
        encoded = self._tokenizer(text, add_special_tokens=False, verbose=False)
        return tuple(encoded["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens, without special ones; U+FFFD where bytes are no character."""
        return str(
            self._tokenizer.decode(
                list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for, special ones by their name; empty if it has no text."""
        return self._bytes.of(token)

    def require_chat_template(self, first_chat: str) -> None:
        """Raises CheckpointError if there is none; `first_chat` names a row that needs it."""
        if self._template is None:
            raise CheckpointError(
                f"{self._folder}: the tokenizer has no chat template, but {first_chat} has "
                "messages; set model.chat_template to a jinja file, or use rows with prompt"
            )

    def _render(self, chat: Chat, variables: Mapping[str, object]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in chat.messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **variables,
            )
        )

    def _render_tools(self, chat: Chat, variables: Mapping[str, object]) -> str:
        """Some templates want the arguments of calls as objects, and some as the JSON text that the
        API has."""
        try:
            return self._render(_changed_calls(chat, _with_objects), variables)
        except Exception:
            return self._render(chat, variables)

    def _leaves_calls_out(self, chat: Chat, variables: Mapping[str, object], text: str) -> bool:
        """Whether a conversation looks the same without its calls. A template may refuse it then,
        since answers of tools are left that nobody asked for."""
        without = _changed_calls(chat, _without_calls)
        try:
            return without != chat and text == self._render(without, variables)
        except Exception:
            return False

    def _refuse_broken_template(self) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            self._render(Chat(messages=({"role": "user", "content": "Hello"},)), {})
        except TemplateSyntaxError as error:
            message = f"the chat template is broken in line {error.lineno}: {error.message}"
            raise CheckpointError(f"{self._folder}: {message}") from None
        except Exception:
            return  # It may well refuse this conversation; rows are told when they are refused.


def load_tokenizer(
    folder: Path,
    *,
    vocab_size: int,
    chat_template: Path | None = None,
    today: datetime.date | None = None,
) -> Tokenizer:
    """Loads a tokenizer from files of a model folder, without network and without its code.

    Chat templates that ask for the date get `today` for the whole run. Raises CheckpointError if
    the tokenizer is missing or damaged, or has tokens beyond the `vocab_size` rows of the model's
    embedding, and ConfigError if `chat_template` cannot be read.
    """
    override = None if chat_template is None else _template_file(chat_template)
    tokenizer = _load(folder)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has token ids up to {largest}, but the model has only "
            f"{vocab_size} tokens; they do not belong together"
        )
    template = override if override is not None else _own_template(tokenizer)
    if template is not None:
        template = _with_date(template, today or datetime.date.today())
    return Tokenizer(tokenizer, folder=folder, template=template)


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; check model.path in the job file")
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # Damaged files make its libraries raise anything.
        message = f"{folder}: the tokenizer cannot be loaded: {_reason(error)}"
        raise CheckpointError(message) from error


def _own_template(tokenizer: Any) -> str | None:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        return None


def _template_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fault = Fault(file=str(path), where="model.chat_template", message=f"not read: {reason}")
        raise ConfigError([fault]) from None


def _with_date(template: str, today: datetime.date) -> str:
    """Dates written into the template, so that a run over midnight has the same prompts."""

    def date(match: re.Match[str]) -> str:
        moment = datetime.datetime.combine(today, datetime.time())
        return json.dumps(moment.strftime(match[2]))

    return _DATE.sub(date, template)


def _first_with_tools(chat: Chat) -> str | None:
    """The first message with tool calls, or with the answer of a tool."""
    for place, message in enumerate(chat.messages):
        if message.get("tool_calls"):
            return f"messages[{place}].tool_calls"
        if message["role"] == "tool":
            return f"messages[{place}].role"
    return None


def _no_tools(place: str, what: str) -> RowRefused:
    return unsupported(place, f"belongs to a use of tools, which the model's chat template {what}")


def _changed_calls(chat: Chat, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Chat:
    messages = (change(each) if each.get("tool_calls") else each for each in chat.messages)
    return replace(chat, messages=tuple(messages))


def _without_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {
            **call,
            "function": {**function, "arguments": parse(function["arguments"].encode())},
        }
    except RowRefused:
        return call


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return shown(lines[0])[1:-1] if lines and len(lines[0]) > 300 else (lines or [repr(error)])[0]
