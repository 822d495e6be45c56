"""A tokenizer: text to tokens, messages to tokens, and the way back."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from moebatch.errors import CheckpointError, ConfigError
from moebatch.quoting import reason, shown
from moebatch.rows.grammars import Grammars
from moebatch.rows.guards import TimeLimit, TooLong, blamed
from moebatch.rows.refused import RowRefused, unsupported, wrong
from moebatch.rows.row import Chat
from moebatch.rows.strict_json import parse
from moebatch.rows.tool_calls import CallReader, Spelled, form_of
from moebatch.spec.reasoning import Reasoning
from moebatch.spec.tools import Tools

NO_CHAT_TEMPLATE = "no_chat_template"
"""Code of rows with messages on a model without a template: a fault of the model, not of rows."""
_LONGEST_RENDERING_S = 10.0
_LONGEST_PROMPT = 2**26
_LOOKED_AT_FIRST = 64
"""Characters for every token that is allowed: so long are few texts, and none that is prose."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_USUAL_ROLES = frozenset({"system", "user", "assistant"})
_MOST_ROLES = 16
"""Of others that are looked at: each takes a rendering."""
_SPACE = "\u2581"
"""Stands for a space in the tokens of sentencepiece."""
_MARKERS = (
    ("<think>", "</think>", ""),
    ("[THINK]", "[/THINK]", ""),
    ("<|channel>", "<channel|>", "thought\n"),
    ("<longcat_think>", "</longcat_think>", ""),
    ("<seed:think>", "</seed:think>", ""),
    ("<mm:think>", "</mm:think>", ""),
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),
)
"""Those of most models, of Mistral, Gemma 4, LongCat-Flash, Seed, MiniMax-M3 and Cohere: what opens
and what closes a thought, and the text with which it begins."""
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
"""Of gpt-oss, whose messages have headers: all are thought but for those of one channel."""
_ANSWERING_CHANNEL = "final"
_HELLO = Chat(messages=({"role": "user", "content": "Hello"},))


class Tokenizer:
    """Text and messages to token ids, and back."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        folder: Path,
        template: str | None,
        template_file: Path | None = None,
        end_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """`template_file` is where a template comes from that is not the model's own, `end_tokens`
        are those beside the one of the tokenizer. Raises CheckpointError if the chat template has a
        syntax error, or ConfigError where it is not the model's own."""
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._folder = folder
        self._template = template
        reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._reserved = reserved | {"messages", "raise_exception", "strftime_now"}
        self._limit = TimeLimit(_LONGEST_RENDERING_S)
        with self._blamed("cannot be used"):
            self._bytes = TokenBytes(tokenizer)
        if template is not None:
            self._refuse_broken_template(template_file)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded."""
        return self._template is not None

    @cached_property
    def reasoning(self) -> Reasoning | None:
        """How the model marks what it thinks; None if its vocabulary has no tokens for that."""
        return _reasoning_of(self._tokenizer)

    @cached_property
    def reasoning_before_calls(self) -> Reasoning | None:
        """The same where an answer may be a call, if that has a header which ends the thought."""
        form, encode = self.calls.form, self._tokenizer
        if self.reasoning is None or form is None:
            return self.reasoning
        headers = (encode(text, add_special_tokens=False)["input_ids"] for text in form.headers)
        return replace(self.reasoning, closes=(*self.reasoning.closes, *map(tuple, headers)))

    @cached_property
    def calls(self) -> CallReader:
        """Reads calls of tools."""
        form = form_of(
            self._template or "", lambda text: token_of(self._tokenizer, text) is not None
        )
        return CallReader(form=form, spell=self._spelled)

    @cached_property
    def call_ends(self) -> frozenset[int]:
        """Tokens that end an answer which is a call."""
        ends = self.calls.form.ends if self.calls.form else ()
        found = (token_of(self._tokenizer, text) for text in ends)
        return frozenset(token for token in found if token is not None)

    def grammars(self, *, vocab_size: int, end_tokens: frozenset[int]) -> Grammars:
        """What compiles grammars for a model of so many tokens, some of which end answers."""
        return Grammars(self._tokenizer, vocab_size=vocab_size, end_tokens=end_tokens)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Where answers end by the tokenizer's own account."""
        token = self._tokenizer.eos_token_id
        return self._end_tokens | ({token} if isinstance(token, int) else frozenset())

    def encode(self, text: str, *, enough: int | None = None) -> tuple[int, ...]:
        """Tokens of a text, with the begin token if the model wants one; of one that has more than
        `enough`, at least so many. Raises CheckpointError where the tokenizer breaks down over it.
        """
        return self._encoded(text, enough, add_special_tokens=True)

    def encode_chat(
        self, chat: Chat, variables: Mapping[str, object], *, enough: int | None = None
    ) -> tuple[int, ...]:
        """Tokens of a conversation, as `encode` has them; `variables` of the job give way to those
        of the chat.

        Raises RowRefused if the template does not take the messages, and CheckpointError where the
        tokenizer breaks down over them.
        """
        if self._template is None:
            message = "messages need a chat template, and the tokenizer of the model has none"
            raise RowRefused(message, code=NO_CHAT_TEMPLATE, param="messages")
        own = {**variables, **chat.variables}
        self.require_free(own)
        try:
            text = self._render_tools(chat, own)
        except Exception as error:  # A template is a program: it may raise anything.
            place = _first_with_tools(chat) or self._offered_in_vain(chat, own)
            if place is not None:
                raise _no_tools(place, f"does not take: {self._reason(error)}") from None
            message = f"messages do not fit the model's chat template: {self._reason(error)}"
            raise RowRefused(message, code="invalid_value", param="messages") from None
        left_out = self._left_out(chat, own, text)
        if left_out is not None:
            raise left_out
        # The template has written the begin token already.
        return self._encoded(text, enough, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens, without special ones; U+FFFD where bytes are no character. Raises
        CheckpointError where the tokenizer breaks down over them."""
        with self._blamed(f"cannot decode {shown(list(tokens))}"):
            return str(
                self._tokenizer.decode(
                    list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
            )

    def _spelled(self, tokens: Sequence[int]) -> Spelled:
        text, shows = "", b""
        for is_special, run in groupby(tokens, self._names.__contains__):
            alike, names = list(run), self._names
            part = "".join(names[token] for token in alike) if is_special else self.decode(alike)
            text, shows = text + part, shows + bytes([not is_special]) * len(part)
        return Spelled(text, shows)

    @cached_property
    def _names(self) -> Mapping[int, str]:
        """Of special tokens, which decoding leaves out."""
        added = self._tokenizer.added_tokens_decoder
        return {token: str(each) for token, each in added.items() if each.special}

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for, special ones by their name; empty if it has no text."""
        with self._blamed(f"cannot decode {token}"):
            return self._bytes.of(token)

    def require_free(self, variables: Iterable[str]) -> None:
        """Raises RowRefused for variables of a chat template that are not the user's to set."""
        for name in sorted(self._reserved.intersection(variables)):
            raise wrong("chat_template_kwargs", f"may not set {name}")

    def require_tools(self, tools: Tools, variables: Mapping[str, object]) -> None:
        """Raises RowRefused if the chat template does not take tools, or leaves them out."""
        offering = replace(_HELLO, tools=tools.definitions)
        try:
            self.encode_chat(offering, variables)
        except RowRefused as refused:
            if refused.error.param == "tools":
                raise  # It may well refuse this conversation for something else.

    def require_chat_template(self, first_chat: str) -> None:
        """Raises CheckpointError if there is none; `first_chat` names a row that needs it."""
        if self._template is None:
            raise CheckpointError(
                f"{self._folder}: the tokenizer has no chat template, but {first_chat} has "
                "messages; set model.chat_template to a jinja file, or use rows with prompt"
            )

    def _encoded(
        self, text: str, enough: int | None, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """A text is looked at as a whole only where its beginning has not too many tokens already:
        encoding takes a hundred times as much memory as the text."""
        beginning = text if enough is None else text[: _LOOKED_AT_FIRST * (enough + 1)]
        tokens: list[int] = []
        with self._blamed(f"cannot encode {shown(text)}"):
            for piece in (beginning, text):
                encoded = self._tokenizer(
                    piece, add_special_tokens=add_special_tokens, verbose=False
                )
                tokens = encoded["input_ids"]
                if len(piece) == len(text) or (enough is not None and len(tokens) > 2 * enough):
                    break
        return tuple(tokens)

    def _blamed(self, fault: str) -> AbstractContextManager[None]:
        return blamed(self._folder, fault)

    def _render(self, chat: Chat, variables: Mapping[str, object]) -> str:
        """Raises whatever the template does, and TooLong or ValueError where it would never end."""
        with self._limit.held():
            text = str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in chat.messages],
                    tools=[dict(tool) for tool in chat.tools] or None,
                    chat_template=self._template,
                    tokenize=False,
                    add_generation_prompt=chat.add_generation_prompt,
                    continue_final_message=chat.continue_final_message,
                    **variables,
                )
            )
        if len(text) > _LONGEST_PROMPT:
            raise ValueError(f"it makes more than {_LONGEST_PROMPT} characters of them")
        return text

    def _reason(self, error: Exception) -> str:
        """Why a template has not rendered."""
        if isinstance(error, TooLong):
            return f"it has not ended within {self._limit.seconds:.0f} s"
        if isinstance(error, MemoryError):
            return "it takes too much memory"
        return reason(error)

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template leaves out texts, or fails over them, but where they are lists of
        parts, as that of MiniMax-Text-01 does."""
        return not self._shows(_HELLO) and self._shows(_in_parts(_HELLO))

    def _shows(self, chat: Chat) -> bool:
        with suppress(Exception):
            return "Hello" in self._render(chat, {})
        return False

    def _render_tools(self, chat: Chat, variables: Mapping[str, object]) -> str:
        """Some templates want the arguments of calls as objects, and some as the JSON text that the
        API has."""
        if self._wants_parts:
            chat = _in_parts(chat)
        if _first_with_tools(chat) is not None:
            with suppress(Exception):
                return self._render(_changed_calls(chat, _with_objects), variables)
        return self._render(chat, variables)

    def _offered_in_vain(self, chat: Chat, variables: Mapping[str, object]) -> str | None:
        """The parameter with tools, if the template takes the conversation without them."""
        if chat.tools:
            with suppress(Exception):
                self._render_tools(replace(chat, tools=()), variables)
                return "tools"
        return None

    def _left_out(
        self, chat: Chat, variables: Mapping[str, object], text: str
    ) -> RowRefused | None:
        """Why not, if a conversation looks the same without what only some templates know. A
        template may refuse it then, such as answers of tools for which there is no call."""
        for refused, without in _without_unusual(chat):
            with suppress(Exception):
                if text == self._render_tools(without, variables):
                    return refused
        return None

    def _refuse_broken_template(self, file: Path | None) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            self._render(_HELLO, {})
        except TemplateSyntaxError as error:
            message = f"is broken in line {error.lineno}: {reason(error)}"
        except (TooLong, MemoryError, RecursionError) as error:
            message = f"is broken: {self._reason(error)}"
        except Exception:
            return  # It may well refuse this conversation; a row that it refuses gets the reason.
        else:
            return
        if file is not None:
            raise ConfigError.at(file, message, where="model.chat_template")
        raise CheckpointError(f"{self._folder}: the chat template {message}")


def token_of(tokenizer: Any, text: str) -> int | None:
    """The token of a text, if a tokenizer of transformers has it in its vocabulary."""
    token = tokenizer.convert_tokens_to_ids(text)
    known = isinstance(token, int) and tokenizer.convert_ids_to_tokens(token) == text
    return token if known else None


def _reasoning_of(tokenizer: Any) -> Reasoning | None:
    """How a model with this tokenizer of transformers marks what it thinks; None if it has no
    tokens for that."""

    find = partial(token_of, tokenizer)
    start, channel, message = map(find, (_START, _CHANNEL, _MESSAGE))
    if start is not None and channel is not None and message is not None:
        name = tokenizer(_ANSWERING_CHANNEL, add_special_tokens=False)["input_ids"]
        headers = {start: message, channel: message}
        return Reasoning(headers=headers, closes=((channel, *name),))
    for opens, closes, label in _MARKERS:
        first, last = find(opens), find(closes)
        if first is not None and last is not None:
            return Reasoning(headers={first: first}, closes=((last,),), label=label)
    return None


class TokenBytes:
    """Bytes of single tokens, since a character may be spread over several."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items()}
        decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        self._alphabet = _byte_alphabet() if "ByteLevel" in decoder else None

    def of(self, token: int) -> bytes:
        """Bytes of one token; none if the tokenizer does not know it."""
        added = self._added.get(token)
        if added is not None:
            return added.encode("utf-8")
        text = self._tokenizer.convert_ids_to_tokens(token)
        if text is None:
            return b""
        if self._alphabet is not None and all(letter in self._alphabet for letter in text):
            return bytes(self._alphabet[letter] for letter in text)
        byte = _BYTE.fullmatch(text)
        if byte:
            return bytes([int(byte[1], 16)])
        return str(text).replace(_SPACE, " ").encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """Letters that stand for bytes in the vocabularies of byte-level tokenizers."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _first_with_tools(chat: Chat) -> str | None:
    """The first message with tool calls, or with the answer of a tool."""
    for place, message in enumerate(chat.messages):
        if message.get("tool_calls"):
            return f"messages[{place}].tool_calls"
        if message["role"] == "tool":
            return f"messages[{place}].role"
    return None


def _without_unusual(chat: Chat) -> Iterator[tuple[RowRefused, Chat]]:
    """The conversation without tools that it offers, without its calls of tools, and without
    messages of each role that not all templates know, as far as it has any; with what to say of the
    first."""
    if chat.tools:
        yield _no_tools("tools", "leaves out"), replace(chat, tools=())
    calls = [place for place, each in enumerate(chat.messages) if each.get("tool_calls")]
    if calls:
        refused = _no_tools(f"messages[{calls[0]}].tool_calls", "leaves out")
        yield refused, _changed_calls(chat, _without_calls)
    roles = [str(each["role"]) for each in chat.messages]
    unusual = (role for role in dict.fromkeys(roles) if role not in _USUAL_ROLES)
    for role in islice(unusual, _MOST_ROLES):
        rest = tuple(each for each in chat.messages if each["role"] != role)
        yield _no_role(f"messages[{roles.index(role)}].role", role), replace(chat, messages=rest)


def _no_role(place: str, role: str) -> RowRefused:
    if role == "tool":
        return _no_tools(place, "leaves out")
    return unsupported(place, f"is {shown(role)}, which the model's chat template leaves out")


def _no_tools(place: str, what: str) -> RowRefused:
    return unsupported(place, f"belongs to a use of tools, which the model's chat template {what}")


def _in_parts(chat: Chat) -> Chat:
    messages = (
        {**each, "content": [{"type": "text", "text": each["content"]}]} for each in chat.messages
    )
    return replace(chat, messages=tuple(messages))


def _changed_calls(chat: Chat, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Chat:
    messages = (change(each) if each.get("tool_calls") else each for each in chat.messages)
    return replace(chat, messages=tuple(messages))


def _without_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        with suppress(RowRefused):
            arguments = parse(function["arguments"].encode())
            return {**call, "function": {**function, "arguments": arguments}}
    return call
