"""Adaptive gating learns how much layers of a model matter, and what may be left out for a loss
that is wanted."""

import time
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from moebatch.calibration.learning_text import Expected, LearningText, evenly
from moebatch.calibration.lessons import Advance
from moebatch.calibration.trade_off import trade_off
from moebatch.calibration.whole_memory import require_whole
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation_files import save_gating
from moebatch.errors import CheckpointError, ConfigError, Fault
from moebatch.model.gating import LearntGating
from moebatch.training.gating_trial import GatingTrial
from moebatch.training.whole_model import load_whole

_MOST_LEARNT_TOKENS = 16384
"""Of which gradients are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatingLesson:
    """What has been learnt, and where it is."""

    file: Path
    learnt: LearntGating
    num_expected: int
    """Tokens on which perplexity was measured."""
    expected: Expected
    """What they were."""
    learn_s: float


def require_learnable(files: ModelFiles, *, longest: int, budget_bytes: int) -> None:
    """Raises ConfigError and DoesNotFit, before anything is read, for what cannot be done with
    sequences of at most `longest` tokens."""
    if files.shape.experts_per_token == 1:
        message = "adaptive leaves out all experts of a token but one, and this model has one"
        raise ConfigError([Fault(file="moebatch calibrate", where="--gating", message=message)])
    require_whole(
        files,
        option="--gating",
        dtype=files.dtype,
        longest=longest,
        learns=False,
        budget_bytes=budget_bytes,
    )


class GatingTeacher:
    """A model to be loaded, and a text; thresholds are tried on what is held out of it."""

    def __init__(self, files: ModelFiles, text: LearningText, *, advance: Advance) -> None:
        self._files = files
        self._text = replace(text, known=evenly(text.known, _MOST_LEARNT_TOKENS))
        self._advance = advance

    def teach(self, path: Path, *, wanted_loss: float) -> GatingLesson:
        """Learns and writes. Raises StorageError, and CheckpointError for weights that are no
        numbers."""
        begun, shape = time.perf_counter(), self._files.shape
        model = load_whole(self._files, dtype=self._files.dtype, experts="eager")
        text = self._text.answered(model, shape.max_positions)
        self._advance(0.3)
        sensitivities = model.fisher_sums(text.known)
        if not all(map(isfinite, sensitivities.values())):
            folder = self._files.checkpoint.folder
            raise CheckpointError(f"{folder}: gradients of this model are no numbers")
        self._advance(0.6)
        trial = GatingTrial(model, text.unseen, sensitivities, shape.num_experts)
        curve, chosen = trade_off(trial.measure, wanted_loss=wanted_loss)
        learnt = LearntGating(
            sensitivities=sensitivities,
            curve=curve,
            wanted_loss=wanted_loss,
            threshold=chosen.threshold,
        )
        save_gating(path, learnt, self._files.owner)
        return GatingLesson(
            file=path,
            learnt=learnt,
            num_expected=text.num_examined,
            expected=text.expected,
            learn_s=time.perf_counter() - begun,
        )
