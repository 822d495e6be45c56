"""What is printed commands no terminal, whoever has said it."""

import logging
import warnings
from collections.abc import Iterator

import pytest

from moebatch.report.console import complain, plain, tame_libraries


@pytest.fixture
def tamed() -> Iterator[None]:
    factory = logging.getLogRecordFactory()
    tame_libraries()
    yield
    logging.setLogRecordFactory(factory)
    logging.captureWarnings(False)


@pytest.mark.usefixtures("tamed")
def test_what_libraries_log_and_warn_of_is_presentable(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("some.library").warning("rope_type %s", "\x1b[31m\ud800")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("x" * 10**6 + "\x1b[2J", stacklevel=1)
    logged, warned = (record.getMessage() for record in caplog.records)
    assert logged == r"rope_type \x1b[31m\ud800"
    assert "\x1b" not in warned
    assert len(warned) < 3000


@pytest.mark.usefixtures("tamed")
def test_a_record_that_cannot_be_put_together_is_left_to_logging() -> None:
    record = logging.getLogRecordFactory()("x", 30, "x", 1, "%d", ("no number",), None)
    assert record.msg == "%d"


def test_an_error_and_a_cell_are_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    complain("\ud800 [bold]\x1b]0;title\x07")
    assert capsys.readouterr().err == "error: \\ud800 [bold]\\x1b]0;title\\x07\n"
    assert plain("[red]\x9b2J") == r"\[red]\x9b2J"
