"""Prompts and messages of a request body."""

from collections.abc import Mapping

from moebatch.quoting import shown
from moebatch.rows.refused import checked, missing, unsupported, without_null, wrong
from moebatch.rows.row import Base64, Chat
from moebatch.spec.files.limits import flag


def chat_of(body: Mapping[str, object]) -> Chat:
    """The conversation of a chat request. Raises RowRefused."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise wrong("messages", f"must be a list of messages, got {shown(messages)}")
    if not messages:
        raise wrong("messages", "must hold at least one message")
    variables = body.get("chat_template_kwargs")
    if variables is not None and not isinstance(variables, dict):
        raise wrong("chat_template_kwargs", f"must be an object, got {shown(variables)}")
    goes_on = _flag(body, "continue_final_message", default=False)
    opens = _flag(body, "add_generation_prompt", default=not goes_on)
    if opens and goes_on:
        message = "cannot be true together with add_generation_prompt"
        raise wrong("continue_final_message", message)
    return Chat(
        messages=tuple(_message(message, place) for place, message in enumerate(messages)),
        variables=without_null(variables or {}),
        add_generation_prompt=opens,
        continue_final_message=goes_on,
    )


def prompt_of(body: Mapping[str, object], name: str = "prompt") -> str | tuple[int, ...]:
    """Text or token ids of a completion request, under that name. Raises RowRefused."""
    prompt = body.get(name)
    if prompt is None:
        raise missing(name, "is null" if name in body else "is missing")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return text_of(prompt, name)
    if not isinstance(prompt, list):
        raise wrong(name, f"must be a text or a list of token ids, got {shown(prompt)}")
    if prompt and all(isinstance(item, dict) for item in prompt):
        raise wrong(name, "is a list of messages; give it the name messages")
    if len(prompt) > 1 and all(isinstance(item, str | list) for item in prompt):
        raise wrong(name, f"holds {len(prompt)} prompts; give each a row of its own")
    for token in prompt:
        if not isinstance(token, int) or isinstance(token, bool):
            raise wrong(name, f"must hold token ids, got {shown(token)}")
    return tuple(prompt)


def text_of(text: str, name: str) -> str:
    """The same. Raises RowRefused for bytes, as which some writers of tables declare texts."""
    if isinstance(text, Base64):
        raise wrong(name, "is binary data; give text, or cast the column to a string")
    return text


def _message(message: object, place: int) -> Mapping[str, object]:
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise wrong(where, f"must be an object with role and content, got {shown(message)}")
    given = without_null(message)  # templates ask what is defined
    role = given.get("role")
    if not isinstance(role, str) or not role:
        raise wrong(f"{where}.role", f"must be a text such as user, got {shown(role)}")
    calls = given.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        message = f"must be a list of objects, got {shown(calls)}"
        raise wrong(f"{where}.tool_calls", message)
    if "function_call" in given:
        raise unsupported(f"{where}.function_call", "is not supported; tool_calls are")
    if "content" not in given and not calls:
        raise missing(f"{where}.content", "is missing")
    # Templates add what goes before the calls, so nothing is an empty text for them.
    given["content"] = _content(given.get("content", ""), f"{where}.content")
    return given


def _content(content: object, where: str) -> str:
    """Text, or the texts of its parts joined by newlines as vLLM does."""
    if isinstance(content, str):
        return text_of(content, where)
    if not isinstance(content, list):
        raise wrong(where, f"must be a text or a list of text parts, got {shown(content)}")
    return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise wrong(where, f"must be an object with a type, got {shown(part)}")
    if kind != "text":
        raise unsupported(where, f"is a part of type {shown(kind)}; only text is supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise wrong(f"{where}.text", f"must be a text, got {shown(text)}")
    return text_of(text, f"{where}.text")


def _flag(body: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = body.get(name)
    return default if value is None else checked(flag, name, value)
