"""JSON as the standard has it: nothing that another reader would refuse or understand otherwise."""

import json
import re
from typing import Any, NoReturn

from moebatch.rows.refused import RowRefused
from moebatch.spec.files.json_file import unique_keys

NOT_JSON = "invalid_json_line"
"""Code of rows that no JSON reader takes, or that are no objects."""
MAX_DEPTH = 100
"""Deeper nesting could be read here and then overflow the stack of the writer or of a template."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse(data: bytes) -> Any:
    """The value of a line of JSON.

    Raises RowRefused with code ``invalid_json_line`` on anything but UTF-8, on NaN and infinity,
    numbers beyond floats, a key given twice, lone surrogates and nesting beyond `MAX_DEPTH`.
    """
    try:
        value = _DECODER.decode(data.decode("utf-8"))
        if _SURROGATE.search(data):
            # Surrogates are fine in pairs; alone they are no text and cannot be written again.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(
            f"not UTF-8 text (byte {error.start + 1} of the line); save it as UTF-8"
        ) from None
    except UnicodeEncodeError:
        raise _invalid("half of a surrogate pair, which is no character") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"not JSON: {_fault(error)} (column {error.colno})") from None
    except RecursionError:
        raise _invalid(f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise _invalid(_shortened(str(error))) from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and not _fits(value, MAX_DEPTH):
        raise _invalid(f"nested deeper than {MAX_DEPTH} levels")
    return value


def _invalid(message: str) -> RowRefused:
    return RowRefused(message, code=NOT_JSON)


def _fault(error: json.JSONDecodeError) -> str:
    if error.msg == "Extra data":
        return "more follows where the line must end, one row on each"
    if not error.msg.startswith("Invalid control character"):
        return error.msg
    escaped = json.dumps(error.doc[error.pos]).strip('"')
    return f"a control character must be written as {escaped}"


def _shortened(message: str) -> str:
    if "integer string conversion" in message:
        return "holds a whole number of thousands of digits"
    return message[:200]


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=unique_keys, parse_float=_finite, parse_constant=_no_constant
)


def _fits(value: object, levels: int) -> bool:
    """Whether a value has no more than so many levels below its own."""
    if not isinstance(value, dict | list):
        return True
    items = value.values() if isinstance(value, dict) else value
    return levels >= 0 and all(_fits(item, levels - 1) for item in items)
