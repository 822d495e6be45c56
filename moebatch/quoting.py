"""Words of others in our messages: what files, libraries and command lines hold may be anything.

`shown` is for values inside a message; `presentable` is the last thing that happens to a message
before people see it, whatever has been put into it.
"""

import re
from collections.abc import Iterable, Mapping

_LONGEST_SHOWN = 60
_LONGEST_REASON = 300
_LONGEST_LINE = 1_000
_MOST_LINES = 60
_MOST_LEVELS = 8
_MOST_BITS = 4096
_COMMANDS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters but tabs and line ends, what breaks lines or turns their direction, what
cannot be seen, and halves of surrogate pairs, which cannot be written at all."""
_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}


def shown(value: object) -> str:
    """A value for an error message: as JSON-like text, cut where it would flood the screen."""
    try:
        text = repr(_trimmed(value, _MOST_LEVELS))
    except Exception:  # an object of someone's own
        text = f"a {type(value).__name__}"
    is_cut = isinstance(value, str | list) and len(value) > _LONGEST_SHOWN
    text = _JSON_WORDS.get(text, text)
    return text[:_LONGEST_SHOWN] + "…" if is_cut or len(text) > _LONGEST_SHOWN else text


def not_one_of(allowed: Iterable[object], value: object) -> str:
    return f"must be one of {', '.join(map(str, allowed))}, got {shown(value)}"


def reason(error: BaseException) -> str:
    """What a library says was wrong, in one line that is not too long."""
    return _said(error) or type(error).__name__


def named_reason(error: BaseException) -> str:
    """The same behind the name of the error."""
    return ": ".join(filter(None, (type(error).__name__, _said(error))))


def system_reason(error: BaseException) -> str:
    """What the system says was wrong, without the path; of errors that are not the system's the
    `reason`."""
    return getattr(error, "strerror", None) or reason(error)


def presentable(text: str) -> str:
    """A message as people can be shown it: harmless, and of bounded length. What is left out is the
    middle of long lines, since advice stands at their end, and lines beyond the first ones."""
    lines = text.split("\n")
    kept = [harmless(_without_middle(line, _LONGEST_LINE)) for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        kept.append(f"… and {len(lines) - _MOST_LINES} more lines")
    return "\n".join(kept)


def harmless(text: str) -> str:
    """Text of which no character commands a terminal, or cannot be written: they are shown as
    their codes."""
    return _COMMANDS.sub(_code, text)


def is_text(text: str) -> bool:
    """Whether UTF-8 can hold it: JSON can spell halves of surrogate pairs, which are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _code(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def _said(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # an error of someone's own need not be able to say anything
        return ""
    return harmless(_without_middle(" ".join(text.split()), _LONGEST_REASON))


def _without_middle(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} … {text[-half:]}"


class _Verbatim(str):
    """Text that stands in a representation without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _trimmed(value: object, levels: int) -> object:
    """So much of a value that its representation fills what is shown, and can be made at all."""
    if isinstance(value, str):
        return value[:_LONGEST_SHOWN]
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return _Verbatim(f"a whole number of about {value.bit_length() * 3 // 10} digits")
    if isinstance(value, list | Mapping) and levels == 0:
        return _Verbatim("…")
    if isinstance(value, list):
        return [_trimmed(item, levels - 1) for item in value[:_LONGEST_SHOWN]]
    if isinstance(value, Mapping):
        items = [item for item, _ in zip(value.items(), range(_LONGEST_SHOWN), strict=False)]
        return {_trimmed(key, 0): _trimmed(item, levels - 1) for key, item in items}
    return value
