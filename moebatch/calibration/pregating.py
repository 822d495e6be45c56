"""Pre-gates learn from a text, and are held against gates that learn where they are."""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moebatch.calibration.learning_text import Expected, LearningText
from moebatch.calibration.lessons import Advance
from moebatch.calibration.whole_memory import require_whole
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation_files import PREGATES, save_pregates
from moebatch.errors import ConfigError, Fault
from moebatch.training.learning_gates import LearningGates, Recipe, learn
from moebatch.training.whole_model import WholeModel, load_whole

USUAL = Recipe()
_DTYPE = torch.float32


def require_possible(
    files: ModelFiles, activation_level: int, *, longest: int, budget_bytes: int
) -> None:
    """Raises ConfigError and DoesNotFit, before anything is read, if gates are to learn what they
    cannot, from sequences of at most `longest` tokens."""
    num_layers = len(files.shape.moe_layers)
    if activation_level >= num_layers:
        message = f"must be less than {num_layers}, the layers that have experts"
        raise ConfigError([Fault(file="moebatch calibrate", where="--level", message=message)])
    require_whole(
        files,
        option="--pregate",
        dtype=_DTYPE,
        longest=longest,
        learns=True,
        budget_bytes=budget_bytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PreGateLesson:
    """What pre-gates have learnt, and what they are worth."""

    file: Path
    activation_level: int
    num_tokens: int
    """That they have learnt from, those seen again included."""
    num_held_out: int
    """Tokens that perplexity is about."""
    expected: Expected
    """What they were."""
    perplexity: Mapping[str, float]
    """Of what was held out, by what chooses experts."""
    learn_s: float
    """Of gates that stay and those that move."""


@dataclass(frozen=True, slots=True)
class _Learnt:
    """Gates that have learnt; exp of the mean loss before and after."""

    before: float
    after: float
    num_tokens: int
    gates: LearningGates


@dataclass(frozen=True, kw_only=True, slots=True)
class PreGateTeacher:
    """A model whose gates are to be moved, and a text."""

    files: ModelFiles
    text: LearningText
    activation_level: int
    recipe: Recipe

    @property
    def description(self) -> str:
        """What is going to happen."""
        steps = f"{self.recipe.num_steps} steps of {self.recipe.batch_tokens} tokens"
        return (
            f"gates learn twice, where they are and moved, {steps} each, from "
            f"{len(self.text.known)} sequences of which they foretell {self.text.expected}"
        )

    def teach(self, folder: Path, advance: Advance) -> PreGateLesson:
        """Trains gates that stay and gates that move alike, and writes the latter into `folder`;
        `advance` gets the share that is done. Raises StorageError."""
        begun = time.perf_counter()
        model = load_whole(self.files, dtype=_DTYPE, experts="grouped_mm")
        text = self.text.answered(model, self.files.shape.max_positions)
        ready = replace(self, text=text)
        staying = ready._learn(model, 0, lambda share: advance(share / 2))
        level = self.activation_level
        moved = ready._learn(model, level, lambda share: advance((1 + share) / 2))
        found = {
            "the checkpoint's gates": staying.before,
            "gates, trained": staying.after,
            "pre-gates, moved only": moved.before,
            "pre-gates, trained": moved.after,
        }
        path = folder / PREGATES.file_name
        save_pregates(
            path,
            moved.gates.pregates(),
            self.files.owner,
            num_tokens=moved.num_tokens,
            perplexity=found,
        )
        return PreGateLesson(
            file=path,
            activation_level=level,
            num_tokens=moved.num_tokens,
            num_held_out=text.num_examined,
            expected=text.expected,
            perplexity=found,
            learn_s=time.perf_counter() - begun,
        )

    def _learn(self, model: WholeModel, activation_level: int, advance: Advance) -> _Learnt:
        gates, text = LearningGates(model, activation_level), self.text
        with closing(gates):
            before = model.perplexity(text.unseen)
            num_tokens = learn(model, gates, text.known, self.recipe, advance)
            return _Learnt(before, model.perplexity(text.unseen), num_tokens, gates)
