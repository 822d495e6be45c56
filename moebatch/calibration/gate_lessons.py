"""What a calibration learns of gates, from gradients: what they may leave out, and how they choose
for later layers."""

from collections.abc import Callable

from moebatch.calibration.gating_lesson import GatingLesson, GatingTeacher, require_learnable
from moebatch.calibration.learning_text import LearningText
from moebatch.calibration.order import CalibrationOrder
from moebatch.calibration.placed_text import PlacedText
from moebatch.calibration.pregating import USUAL, PreGateLesson, PreGateTeacher, require_possible
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation_files import GATING
from moebatch.plan.machine import detect_machine
from moebatch.rows.prompts import RowReader
from moebatch.store.memory import return_freed_memory
from moebatch.training.whole_model import ANSWER_TOKENS


class GateLessons:
    """Those of one order: both, one of them or none."""

    def __init__(
        self,
        order: CalibrationOrder,
        files: ModelFiles,
        *,
        sequence_tokens: int,
        tell: Callable[[str], None],
        advance: Callable[[float], None],
    ) -> None:
        """Sequences are of `sequence_tokens` at most.

        Raises ConfigError and DoesNotFit for what cannot be learnt from gradients.
        """
        self._order = order
        self._files = files
        self._sequence_tokens = sequence_tokens
        self._tell = tell
        self._advance = advance
        self._text: LearningText | None = None
        room = order.dram_bytes or detect_machine().dram_bytes
        longest = min(sequence_tokens + ANSWER_TOKENS, files.shape.max_positions)
        if order.gating_loss is not None:
            require_learnable(files, longest=longest, budget_bytes=room)
        if order.activation_level is not None:
            level = order.activation_level
            require_possible(files, level, longest=longest, budget_bytes=room)

    def take(self, reader: RowReader, text: PlacedText) -> None:
        """What gradients are taken of, if of anything. Raises InputError."""
        if self._order.gating_loss is not None or self._order.activation_level is not None:
            self._text = LearningText.of(
                self._order.text, reader, text.sequences, longest=self._sequence_tokens
            )

    def teach_gating(self) -> GatingLesson | None:
        """How much gates may leave out, if that was asked for."""
        wanted_loss, text = self._order.gating_loss, self._text
        if wanted_loss is None or text is None:
            return None
        return_freed_memory()
        self._tell(f"learning what gates may leave out for {wanted_loss:.3g} of perplexity")
        teacher = GatingTeacher(self._files, text, advance=self._advance)
        path = self._order.table.parent / GATING.file_name
        return teacher.teach(path, wanted_loss=wanted_loss)

    def teach_pregates(self) -> PreGateLesson | None:
        """Has gates learn to choose for later layers, if they are to."""
        level, text = self._order.activation_level, self._text
        if level is None or text is None:
            return None
        return_freed_memory()
        teacher = PreGateTeacher(files=self._files, text=text, activation_level=level, recipe=USUAL)
        self._tell(teacher.description)
        return teacher.teach(self._order.table.parent, self._advance)
