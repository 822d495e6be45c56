"""Words of others in messages: bounded, printable, and never an error of their own."""

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import ConfigError, Fault, MoebatchError
from moebatch.quoting import harmless, presentable, reason, shown
from moebatch.spec.request import RowError

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()))
TURNING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXT, inner),
)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@given(VALUES)
def test_a_value_is_shown_in_one_short_line_that_can_be_written(value: object) -> None:
    text = shown(value)
    text.encode()
    assert text.isprintable()
    assert len(text) <= 61


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "null"),
        (True, "true"),
        ("a\x1b[2J", r"'a\x1b[2J'"),
        ("\ud800\u202e", r"'\ud800\u202e'"),
        (["x", 1.5], "['x', 1.5]"),
        ({"a": 1}, "{'a': 1}"),
        (10**5000, "a whole number of about 4983 digits"),
        ([10**5000], "[a whole number of about 4983 digits]"),
        (nested(2000), "[[[[[[[[…]]]]]]]]"),
        ("x" * 61, "'" + "x" * 59 + "…"),
        (list(range(10**6)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 1…"),
    ],
    ids=range(11),
)
def test_values_as_they_are_shown(value: object, text: str) -> None:
    assert shown(value) == text


@given(ANY_TEXT)
def test_a_message_can_be_written_and_commands_nothing(text: str) -> None:
    presentable(text).encode()
    for letter in harmless(text):
        assert unicodedata.category(letter) not in ("Cc", "Cs", "Zl", "Zp") or letter in "\t\n"
        assert unicodedata.bidirectional(letter) not in TURNING
    assert harmless(harmless(text)) == harmless(text)


def test_what_is_harmless_stays() -> None:
    for text in ("naïve 日本語 🙂👩‍👩‍👧", "a\tb\nc", "", "[bold]x[/]"):
        assert presentable(text) == text


def test_an_escape_sequence_a_million_times_is_a_short_message_with_its_advice() -> None:
    message = str(MoebatchError(f"job.yaml: {chr(27)}" + "[2J" * 10**6 + " is wrong; mend it"))
    assert len(message) < 4100
    assert message.startswith(r"job.yaml: \x1b[2J")
    assert message.endswith("[2J is wrong; mend it")


def test_thousands_of_faults_are_some_lines_and_a_number() -> None:
    faults = [Fault(file="job.yaml", message="wrong", line=n) for n in range(1, 5001)]
    error = ConfigError(faults)
    lines = str(error).splitlines()
    assert lines[0] == "job.yaml:1: wrong"
    assert lines[-1] == "… and 141 more lines"
    assert [str(fault) for fault in error.faults[-2:]] == [
        "job.yaml:200: wrong",
        "job.yaml: and 4800 more",
    ]


def test_the_error_of_a_row_quotes_no_more_than_a_screenful() -> None:
    name = "\ud800" * 10**6
    error = RowError(status=400, code="x", message=f"{name} is not supported", param=name)
    assert error.message.endswith(r"\ud800 is not supported")
    assert len(error.message) + len(error.param or "") < 13_000
    (error.message + (error.param or "")).encode()


def test_what_libraries_say_is_one_line() -> None:
    assert reason(ValueError("of field x:\n   a\x1b")) == r"of field x: a\x1b"
    assert reason(ValueError()) == "ValueError"
    assert len(reason(ValueError("x" * 10**6))) < 310
