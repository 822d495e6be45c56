"""Has the predictors that were asked for learn from a text that was read."""

from collections.abc import Callable

from moebatch.calibration.lessons import LEARNT_FILES, Lesson, Teacher
from moebatch.calibration.order import CalibrationOrder
from moebatch.calibration.placed_text import HELD_OUT_SHARE
from moebatch.calibration.text_embedding import TextEmbedding
from moebatch.calibration.text_reading import TextReading
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.store.dense import load_gates
from moebatch.store.memory import return_freed_memory


def teach_predictors(
    order: CalibrationOrder,
    reading: TextReading,
    files: ModelFiles,
    tell: Callable[[str], None],
    advance: Callable[[float], None],
) -> tuple[Lesson, ...]:
    """Those that have not learnt yet, each kept as soon as it has; the lessons of all."""
    return_freed_memory()
    folder = order.table.parent
    places = {
        name: folder / kind.file_name
        for name, kind in LEARNT_FILES.items()
        if name in order.predictors
    }
    lessons = {lesson.name: lesson for lesson in reading.lessons(places)}
    missing = [name for name in places if name not in lessons]
    if missing:
        teacher = _teacher(reading, files)
        tell(f"learning from {len(teacher.known)} tokens: {', '.join(missing)}")
        for lesson in teacher.teach(missing, folder, advance):
            reading.keep_lesson(lesson)
            lessons[lesson.name] = lesson
    return tuple(lessons[name] for name in places)


def _teacher(reading: TextReading, files: ModelFiles) -> Teacher:
    num_known, num_seen = reading.text.num_known, reading.num_seen
    if num_seen <= num_known:  # nothing of what was held out was kept
        num_known = round(num_seen * (1 - HELD_OUT_SHARE))
    known = reading.seen(range(num_known))
    return Teacher(
        owner=files.owner,
        gates_LED=[gate.float() for gate in load_gates(files)],
        vocab_size=files.shape.vocab_size,
        embed=TextEmbedding(files, known.tokens_N),
        known=known,
        unseen=reading.seen(range(num_known, num_seen)),
    )
