"""Durations of tasks from a file: kinds of tasks and their seconds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from moebatch.schedule.task import Kind
from moebatch.spec.files.values import real_number

_MOST_S = 1e6


def load_durations(path: Path) -> Mapping[Kind, float]:
    """``attend: 0.002``: seconds by the kinds of `schedule/task.py`. YAML or JSON.

    Raises ConfigError with all faults of the file at once.
    """
    # Here, so that commands start without pydantic.
    from pydantic import create_model

    from moebatch.spec.files.form import Form, given, read_form

    seconds: Any = (Annotated[float | None, real_number(0, _MOST_S)], None)
    form = create_model("Durations", __base__=Form, **dict.fromkeys(Kind, seconds))
    found = given(read_form(path, form, kind="durations file"))
    return {Kind(name): seconds for name, seconds in found.items()}
