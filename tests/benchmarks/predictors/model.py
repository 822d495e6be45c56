"""The built-in model with everything that can be learnt of its routing beside it."""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from random import Random

import demo
from demo.tasks import KINDS, Task, draw_task
from moebatch.calibration.calibrate import Calibration
from moebatch.calibration.order import CalibrationOrder
from tests.benchmarks.predictors.rows import turns

_NUM_CONVERSATIONS = 2500
_NUM_PROMPTS = 4000
_NUM_TOKENS = 65536
_GATING_LOSS_PERCENT = 1.0
"""Of perplexity."""
_DONE = "calibrated"


def demo_model(folder: Path, tell: Callable[[str], None]) -> Path:
    """A copy of the built-in model with all predictors, made once in `folder`."""
    text = folder / "text.jsonl"
    order = CalibrationOrder(
        model=folder / "model",
        text=text,
        num_tokens=_NUM_TOKENS,
        predictor=("all",),
    )
    return _calibrated(order, _conversations(), tell)


def gated_model(folder: Path, tell: Callable[[str], None]) -> Path:
    """The same with a threshold for adaptive gating and with pre-gates, too, learnt from what the
    model answers (minutes)."""
    order = CalibrationOrder(
        model=folder / "gated",
        text=folder / "prompts.jsonl",
        num_tokens=_NUM_TOKENS,
        predictor=("all",),
        gating="adaptive",
        loss=_GATING_LOSS_PERCENT,
        pregate=True,
    )
    return _calibrated(order, _prompts(), tell)


def _calibrated(order: CalibrationOrder, text: Iterator[str], tell: Callable[[str], None]) -> Path:
    model = order.model
    if not (model / _DONE).is_file():
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(Path(demo.__file__).parent / "model", model)
        order.text.write_text("".join(f"{line}\n" for line in text))
        Calibration(order, tell).execute()
        (model / _DONE).touch()
    return model


def _conversations() -> Iterator[str]:
    """Rows with questions of the model's training and their answers, since answers are routed as
    answers are."""
    for number, task in enumerate(_tasks(_NUM_CONVERSATIONS)):
        said = turns(task.prompt, task.answer)
        yield json.dumps({"id": str(number), "messages": said, "add_generation_prompt": False})


def _prompts() -> Iterator[str]:
    """The same questions without their answers."""
    for number, task in enumerate(_tasks(_NUM_PROMPTS)):
        said = turns(task.prompt, task.answer)[:1]
        yield json.dumps({"id": str(number), "messages": said})


def _tasks(count: int) -> Iterator[Task]:
    """None of them is among those that are measured."""
    rng = Random(0)
    for kind in islice(cycle(KINDS), count):
        yield draw_task(rng, kind, held_out=False)
