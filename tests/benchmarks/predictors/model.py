"""The built-in model with everything that can be learnt of its routing beside it."""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from random import Random

from moebatch import demo
from moebatch.calibration.calibrate import Calibration
from moebatch.calibration.lessons import parse_predictors
from moebatch.calibration.order import CalibrationOrder
from moebatch.demo.tasks import KINDS, draw_task
from tests.benchmarks.predictors.rows import turns

_NUM_CONVERSATIONS = 2500
_NUM_TOKENS = 65536
_DONE = "calibrated"


def demo_model(folder: Path, tell: Callable[[str], None]) -> Path:
    """A calibrated copy of the built-in model, made once in `folder`."""
    model, text = folder / "model", folder / "text.jsonl"
    if not (model / _DONE).is_file():
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(Path(demo.__file__).parent / "model", model)
        text.write_text("".join(f"{line}\n" for line in _lessons(_NUM_CONVERSATIONS)))
        order = CalibrationOrder(
            model=model, text=text, num_tokens=_NUM_TOKENS, predictors=parse_predictors(["all"])
        )
        Calibration(order, tell).execute()
        (model / _DONE).touch()
    return model


def _lessons(count: int) -> Iterator[str]:
    """Rows with questions of the model's training and their answers: none of them is among those
    that are measured, and answers are routed as answers are."""
    rng = Random(0)
    for number, kind in enumerate(islice(cycle(KINDS), count)):
        task = draw_task(rng, kind, held_out=False)
        said = turns(task.prompt, task.answer)
        row = {"id": str(number), "messages": said, "add_generation_prompt": False}
        yield json.dumps(row)
