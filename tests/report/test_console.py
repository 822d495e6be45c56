"""Lines are broken between words, never in what is to be copied, and end with their last word."""

import logging
import warnings
from collections.abc import Iterator
from io import BytesIO, StringIO, TextIOWrapper

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group
from rich.text import Text

from moebatch.report.console import (
    make_logs_presentable,
    output_console,
    plain,
    print_error,
    print_in_any_locale,
    say,
    show,
    whole,
    wrapped,
)
from moebatch.report.tables import NamedRows, Paragraph, share_bar, titled_columns

NOTE = (
    "warning: predictors learnt for another model are left aside; run `moebatch calibrate "
    "/models/Mixtral-8x7B-Instruct-v0.1 --text texts.jsonl` again, or set experts.predictor to none"
)
COMMAND = "moebatch calibrate /models/Mixtral-8x7B-Instruct-v0.1 --text texts.jsonl"


def screen(width: int, *, is_terminal: bool = True) -> tuple[Console, StringIO]:
    file = StringIO()
    return Console(file=file, width=width, force_terminal=is_terminal, color_system=None), file


@pytest.mark.parametrize("width", [20, 40, 80])
def test_on_a_terminal_lines_end_between_words_and_commands_stay_whole(width: int) -> None:
    console, file = screen(width)
    say(console, NOTE)
    lines = file.getvalue().splitlines()
    assert " ".join(lines) == NOTE
    assert sum(f"`{COMMAND}`" in line for line in lines) == 1
    assert all(len(line) <= width or " " not in line or COMMAND in line for line in lines)


def test_in_a_log_a_message_is_one_line() -> None:
    console, file = screen(40, is_terminal=False)
    say(console, NOTE)
    assert file.getvalue() == f"{NOTE}\n"


@given(st.lists(st.text("ab`é漢", min_size=1, max_size=30)), st.integers(1, 40))
def test_wrapping_loses_no_word(words: list[str], width: int) -> None:
    lines = [line.plain for line in wrapped(Text(" ".join(words)), width)]
    assert " ".join(lines).split() == " ".join(words).split()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_rows_with_names_keep_paths_and_commands_whole(is_terminal: bool) -> None:
    rows = NamedRows()
    rows.add_row("output", whole("/a/very/long/path with blanks/that/fits/into/no/line.jsonl"))
    rows.add_row("next", f"then run {whole(COMMAND)} and go on")
    console, file = screen(40, is_terminal=is_terminal)
    show(console, rows)
    lines = file.getvalue().splitlines()
    assert lines[0] == "output  /a/very/long/path with blanks/that/fits/into/no/line.jsonl"
    assert sum(COMMAND in line for line in lines) == 1


def test_logs_have_no_blanks_at_the_ends_of_lines() -> None:
    table = titled_columns()
    table.add_column("state")
    table.add_column("where")
    table.add_row("running", "a host with a long name")
    table.add_row("done", "here")
    rows = NamedRows()
    rows.add_row("rows", share_bar(0.5))
    rows.add_row("", "")
    console, file = screen(80, is_terminal=False)
    show(console, Group(table, "", rows, Paragraph("note: [no] markup")))
    lines = file.getvalue().splitlines()
    assert all(line == line.rstrip() for line in lines)
    assert lines[-1] == "note: [no] markup"


@pytest.fixture
def presentable_logs() -> Iterator[None]:
    factory = logging.getLogRecordFactory()
    make_logs_presentable()
    yield
    logging.setLogRecordFactory(factory)
    logging.captureWarnings(False)


@pytest.mark.usefixtures("presentable_logs")
def test_what_libraries_log_and_warn_of_is_presentable(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("some.library").warning("rope_type %s", "\x1b[31m\ud800")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("x" * 10**6 + "\x1b[2J", stacklevel=1)
    logged, warned = (record.getMessage() for record in caplog.records)
    assert logged == r"rope_type \x1b[31m\ud800"
    assert "\x1b" not in warned
    assert len(warned) < 3000


@pytest.mark.usefixtures("presentable_logs")
def test_a_record_that_cannot_be_put_together_is_left_to_logging() -> None:
    record = logging.getLogRecordFactory()("x", 30, "x", 1, "%d", ("no number",), None)
    assert record.msg == "%d"


def test_where_columns_are_said_to_be_none_views_are_printed_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    show(output_console(), NamedRows([("rows", "12 done")]))
    assert capsys.readouterr().out == "rows  12 done\n"


def test_an_error_and_a_cell_are_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("\ud800 [bold]\x1b]0;title\x07")
    assert capsys.readouterr().err == "error: \\ud800 [bold]\\x1b]0;title\\x07\n"
    assert plain("[red]\x9b2J") == r"\[red]\x9b2J"


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("utf-8", "██·· µ… é → 語"), ("latin-1", "##·· µ... é -> ?"), ("ascii", "##.. u... ? -> ?")],
)
def test_signs_that_an_encoding_lacks_are_written_as_others(
    encoding: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = BytesIO()
    stream = TextIOWrapper(written, encoding=encoding)
    monkeypatch.setattr("sys.stdout", stream)
    print_in_any_locale()
    stream.write("██·· µ… é → 語")
    stream.flush()
    assert written.getvalue().decode(encoding) == expected
