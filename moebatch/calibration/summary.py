"""What has come of a calibration."""

from dataclasses import dataclass
from pathlib import Path

from moebatch.calibration.comparison import Comparison
from moebatch.calibration.gating_lesson import GatingLesson
from moebatch.calibration.lessons import Lesson
from moebatch.calibration.pregating import PreGateLesson


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationSummary:
    """What a calibration has done."""

    table: Path
    trace: Path | None
    num_sequences: int
    num_tokens: int
    num_held_out: int
    """Tokens among them on which accuracy was measured."""
    num_passes: int
    run_s: float
    comparisons: tuple[Comparison, ...]
    """Empty where the text was too short to hold something out."""
    lessons: tuple[Lesson, ...] = ()
    """Of predictors that have learnt beside the table."""
    learn_s: float = 0.0
    """How long they took."""
    gating: GatingLesson | None = None
    """What gates may leave out, if that was asked for."""
    pregates: PreGateLesson | None = None
    """Of gates that have learnt to choose for later layers, if they were to."""
