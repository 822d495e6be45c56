"""The built-in model with everything that can be learnt of its routing beside it."""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from random import Random

from moebatch import demo
from moebatch.demo.tasks import KINDS, draw_task
from moebatch.job.calibrate import Calibration
from moebatch.job.calibration_order import CalibrationOrder
from moebatch.job.lessons import parse_predictors

NUM_CONVERSATIONS = 2500
NUM_TOKENS = 65536
_DONE = "calibrated"


def demo_model(folder: Path, tell: Callable[[str], None]) -> Path:
    """A calibrated copy of the built-in model, made once in `folder`."""
    model = folder / "model"
    if not (model / _DONE).is_file():
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(Path(demo.__file__).parent / "model", model)
        text = folder / "conversations.jsonl"
        text.write_text("".join(f"{line}\n" for line in conversations(NUM_CONVERSATIONS)))
        learn(model, text, tell)
        (model / _DONE).touch()
    return model


def learn(model: Path, text: Path, tell: Callable[[str], None]) -> None:
    """Has every predictor learn from a text."""
    order = CalibrationOrder(
        model=model, text=text, num_tokens=NUM_TOKENS, predictors=parse_predictors(["all"])
    )
    Calibration(order, tell).execute()


def conversations(count: int) -> Iterator[str]:
    """Rows with questions of the model's training and their answers, as lines: none of them is
    among those that are measured, and their answers are routed as answers are."""
    rng = Random(0)
    for number, kind in enumerate(islice(cycle(KINDS), count)):
        task = draw_task(rng, kind, held_out=False)
        messages = [
            {"role": "user", "content": task.prompt},
            {"role": "assistant", "content": task.answer},
        ]
        row = {"id": str(number), "messages": messages, "add_generation_prompt": False}
        yield json.dumps(row)
