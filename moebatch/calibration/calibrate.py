"""Reads a text with a model and keeps which experts follow which: Klotski's warm-up run.

The last tenth of the text is held out: the table is first asked what it would have predicted there,
then that tenth is counted as well.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moebatch.advance import Advance, unwatched
from moebatch.calibration.counting import Comparison, count, trace_of
from moebatch.calibration.gate_lessons import GateLessons, GatingLesson, PreGateLesson
from moebatch.calibration.lessons import (
    Lesson,
    accuracies,
    earlier_accuracies,
    require_sizes,
    teach_predictors,
)
from moebatch.calibration.order import CalibrationOrder
from moebatch.calibration.reading_policy import reading_engine, text_engine, text_job
from moebatch.calibration.text_reading import TextReading
from moebatch.calibration.texts import HELD_OUT_SHARE, SEQUENCE_TOKENS, PlacedText, read_sequences
from moebatch.engine.approximation_files import GATING, PREGATES
from moebatch.engine.spec import EngineSpec, shares_beginnings
from moebatch.errors import ConfigError
from moebatch.folder.work_folder import WorkFolder
from moebatch.job.opened import OpenedJob
from moebatch.measure.saved import require_writable_file
from moebatch.predict.learnt_files import (
    FIRST_GATE,
    HABITS,
    LEARNED,
    TABLE,
    TOKENS,
    empty_table,
    save_habits,
    save_table,
)
from moebatch.predict.path_table import PathTable
from moebatch.predict.routing_habits import measure_habits
from moebatch.predict.trace import TRACE
from moebatch.spec.files.text_file import is_same_file


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


class Calibration:
    """One calibration, from a text to a table. One that was broken off goes on when the same is
    asked for again."""

    def __init__(
        self,
        order: CalibrationOrder,
        log: Callable[[str], None],
        advance: Advance = unwatched,
    ) -> None:
        """`log` gets lines for the user; `advance` the share of the text, 0 to 1, that is read."""
        self._order = order
        self._log = log
        self._advance = advance
        self._opened: OpenedJob
        self._reading: TextReading | None = None

    @property
    def num_kept(self) -> int:
        """Tokens that need not be read again, should it be broken off now."""
        return self._reading.num_kept if self._reading else 0

    def execute(self) -> CalibrationSummary:
        """Reads, counts and writes.

        Raises MoebatchError when text, model, memory or places to write are not fit for it, and
        LockHeld if another process does the same.
        """
        order = self._order
        self._opened = text_job(
            order.model, order.source, output=order.table, dram_bytes=order.dram_bytes
        )
        files = self._opened.files
        _require_places(order)
        table = empty_table(files.owner, order.path_length)
        require_sizes(order.predictors, files.owner, vocab_size=files.shape.vocab_size)
        gates = GateLessons(
            order,
            files,
            sequence_tokens=SEQUENCE_TOKENS,
            log=self._log,
            advance=self._advance,
        )
        folder = reading_folder(order.table)
        with folder.locked():
            summary = self._read_and_learn(folder, table, gates)
            folder.remove()
        return summary

    def _read_and_learn(
        self, folder: WorkFolder, table: PathTable, gates: GateLessons
    ) -> CalibrationSummary:
        text = self._text()
        gates.take(self._opened.reader, text)
        spec = self._spec(table, text)
        reading = self._reading = TextReading(
            folder,
            text,
            self._opened.files,
            with_hidden=bool(self._order.predictors),
            log=self._log,
            advance=self._advance,
        )
        begun = time.perf_counter()
        num_passes = 0 if reading.is_over else self._go_on(reading, spec)
        run_s = time.perf_counter() - begun
        summary = self._learn(reading, table, num_passes=num_passes, run_s=run_s)
        return replace(summary, gating=gates.teach_gating(), pregates=gates.teach_pregates())

    def _learn(
        self, reading: TextReading, table: PathTable, *, num_passes: int, run_s: float
    ) -> CalibrationSummary:
        order, text, files = self._order, reading.text, self._opened.files
        known, unseen = (reading.chosen(held_out=held_out) for held_out in (False, True))
        popular_LE, comparisons = count(table, known, unseen)
        save_table(order.table, replace(table, num_tokens=text.num_tokens), files.owner)
        if order.trace is not None:
            trace = trace_of([*known, *unseen], table)
            trace.save(order.trace, fingerprint=files.owner.fingerprint)
        summary = CalibrationSummary(
            table=order.table,
            trace=order.trace,
            num_sequences=len(text.sequences),
            num_tokens=text.num_read,
            num_held_out=sum(map(len, text.held_out)),
            num_passes=num_passes,
            run_s=run_s,
            comparisons=comparisons,
        )
        if order.predictors:
            begun = time.perf_counter()
            lessons = teach_predictors(order, reading, files, self._log, self._advance)
            learn_s = time.perf_counter() - begun
            summary = replace(summary, lessons=lessons, learn_s=learn_s)
        if summary.comparisons:  # what caches and predictors are worth, for the planner
            unseen_LTK = np.concatenate(unseen, axis=1)
            accuracy = earlier_accuracies(order, files.owner)
            accuracy |= accuracies(summary.comparisons, summary.lessons)
            habits = measure_habits(unseen_LTK, popular_LE, accuracy)
            save_habits(HABITS.beside(order.table), habits, files.owner)
        return summary

    # --- before the first pass ------------------------------------------------------------------

    def _text(self) -> PlacedText:
        files, reader = self._opened.files, self._opened.reader
        wanted = self._order.num_tokens
        sequences = read_sequences(
            self._order.source, reader, num_tokens=wanted, sequence_tokens=SEQUENCE_TOKENS
        )
        most_tokens = max(map(len, sequences), default=0) + 1
        text = PlacedText.of(sequences, shares=shares_beginnings(files, most_tokens))
        found = text.num_read
        less = f", fewer than the {wanted} asked for" if found < wanted else ""
        self._log(f"text: {found} tokens in {len(sequences)} sequences{less}")
        return text

    def _spec(self, table: PathTable, text: PlacedText) -> EngineSpec:
        """An engine that leaves room for the table and for what gates choose."""
        shape, kept = self._opened.files.shape, 1.0 if self._order.trace else HELD_OUT_SHARE
        choices = kept * text.num_tokens * len(shape.moe_layers) * shape.experts_per_token
        held_bytes = table.num_bytes + round(choices * 2)
        spec = text_engine(self._opened, text.sequences, held_bytes=held_bytes)
        self._log(f"policy: {spec.policy}")
        return spec

    # --- the passes, and what is made of them ---------------------------------------------------

    def _go_on(self, reading: TextReading, spec: EngineSpec) -> int:
        """Reads what is left; returns the number of passes. The model is gone from memory then."""
        spec = replace(spec, observer=reading.observer)
        with reading_engine(spec, self._opened, self._log) as engine:
            reading.go_on(engine, spec.policy)
        return engine.statistics.num_passes


def reading_folder(table: Path) -> WorkFolder:
    """Where what gates say is kept until `table` is written."""
    path = table.with_name(f"{table.stem}.reading")
    return WorkFolder(path, subject=table)


def _require_places(order: CalibrationOrder) -> None:
    """Raises StorageError and ConfigError before anything is computed."""
    beside = (HABITS, TOKENS, LEARNED, FIRST_GATE, GATING, PREGATES)
    taken = [(order.source, "is the text that is read")]
    taken += [(kind.beside(order.table), f"is where the {kind.title} goes") for kind in beside]
    reading = reading_folder(order.table)
    taken += [(path, "is where what is read is kept") for path in (reading.path, reading.lock)]
    places = ("--output", order.table, TABLE), ("--trace", order.trace, TRACE)
    for option, path, kind in places:
        if path is None:
            continue
        require_writable_file(path)
        fault = next((message for other, message in taken if is_same_file(path, other)), None)
        is_named = path in (order.output, order.trace)
        if is_named and path.is_file() and path.stat().st_size and not kind.is_of(path):
            fault = fault or f"{path} is there, and is no {kind.title}"
        if fault:
            raise ConfigError.at(option, f"{fault}; give another place")
        taken.append((path, "is where the table goes"))
