"""Reads a text with a model and keeps which experts follow which: Klotski's warm-up run.

The last tenth of the text is held out: the table is first asked what it would have predicted there,
then that tenth is counted as well.

Shape letters: L MoE layers, T tokens of a pass, K experts per token.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.gating_file import GATING
from moebatch.engine.model_files import ModelFiles, load_gates, open_model
from moebatch.engine.order import Order
from moebatch.errors import CheckpointError, ConfigError, DoesNotFit, Fault, StorageError
from moebatch.job.calibration_order import CalibrationOrder
from moebatch.job.comparison import Comparison, compare, trace_of
from moebatch.job.gating_lesson import ANSWER_TOKENS, GatingLesson, GatingTeacher, require_learnable
from moebatch.job.learning_text import samples_of
from moebatch.job.lessons import Lesson, Teacher, accuracies, require_sizes
from moebatch.job.planning import job_problem
from moebatch.job.pregating import PreGateLesson, PreGateTeacher, require_possible
from moebatch.job.reading_policy import reading_policy
from moebatch.job.texts import TokenSequence, is_plain_text, read_sequences
from moebatch.measure.saved import machine_profile, require_writable_file
from moebatch.plan.machine import detect_machine
from moebatch.predict.habits_file import HABITS, save_habits
from moebatch.predict.hidden_trace import HiddenTrace
from moebatch.predict.owner import ModelOwner
from moebatch.predict.path_table import PathTable
from moebatch.predict.predictor import Chosen, PassTokens, RoutingObserver
from moebatch.predict.routing_habits import measure_habits
from moebatch.predict.table_file import empty_table, save_table
from moebatch.predict.trace import TraceRecorder
from moebatch.rows.prepare import prepare
from moebatch.rows.prompts import RowReader
from moebatch.spec.job import InputSection, Job, ModelSection, OutputSection, ResourcesSection
from moebatch.spec.policy import Policy
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from moebatch.spec.workload import Workload
from moebatch.store.memory import return_freed_memory

SEQUENCE_TOKENS = 512
"""As in Klotski's warm-up."""
HELD_OUT_SHARE = 0.1
_READING = Sampling(max_tokens=1, temperature=0.0)


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
    """One calibration, from a text to a table."""

    def __init__(
        self,
        order: CalibrationOrder,
        tell: Callable[[str], None],
        advance: Callable[[float], None] = lambda share: None,
    ) -> None:
        """`tell` gets lines for the user; `advance` the share of the text, 0 to 1, that is read."""
        self._order = order
        self._tell = tell
        self._advance = advance
        self._recorded: list[NDArray[np.integer]] = []
        self._counting = True
        self._num_counted = 0
        """Of the recorded passes, those that the table has counted before the rest."""
        self._popular_LE: NDArray[np.integer] = np.zeros((0, 0), np.int64)
        """How often each expert was chosen in these."""
        self._trace: HiddenTrace | None = None
        """What gates see; None if nobody learns from it."""
        self._num_known = 0
        """Its tokens that are not held out."""

    def execute(self) -> CalibrationSummary:
        """Reads, counts and writes.

        Raises MoebatchError when text, model, memory or places to write are not fit for it.
        """
        order = self._order
        _require_places(order)
        files = open_model(order.model, "auto")
        owner = files.owner
        table = empty_table(owner, order.path_length)
        require_sizes(order.predictors, owner, vocab_size=files.shape.vocab_size)
        require_possible(order, files.shape, longest=SEQUENCE_TOKENS)
        job = _job(order)
        reader = self._reader(job, files)
        sequences = self._sequences(reader, files)
        self._require_gating(files, sequences)
        pregates = _pregates_of(order, reader, sequences, owner)
        policy, max_tokens = self._policy(job, files, table, sequences)
        if order.predictors:
            self._trace = _trace_beside(order.table, owner, files, _count(sequences))
        built = self._built(files, owner, table, policy, max_tokens, reader, _count(sequences))
        summary = self._run(built, table, owner, sequences)
        del built  # those who learn may have its memory
        if self._trace is not None:
            summary = self._teach(summary, self._trace, files, owner)
        if summary.comparisons:
            self._save_habits(summary, owner)
        if order.gating_loss is not None:
            summary = self._teach_gating(summary, files, sequences, order.gating_loss)
        if pregates is not None:
            return_freed_memory()
            self._tell(pregates.description)
            lesson = pregates.teach(order.table.parent, self._advance)
            summary = replace(summary, pregates=lesson)
        return summary

    def _save_habits(self, summary: CalibrationSummary, owner: ModelOwner) -> None:
        """What caches and predictors are worth, for the planner."""
        unseen_LTK = np.concatenate(self._recorded[self._num_counted :], axis=1)
        accuracy = accuracies(summary.comparisons, summary.lessons)
        habits = measure_habits(unseen_LTK, self._popular_LE, accuracy)
        save_habits(self._order.table.with_name(HABITS.file_name), habits, owner)

    def _built(
        self,
        files: ModelFiles,
        owner: ModelOwner,
        table: PathTable,
        policy: Policy,
        max_tokens: int,
        reader: RowReader,
        num_tokens: int,
    ) -> BuiltEngine:
        recorder = TraceRecorder(
            owner.moe_layers,
            experts_per_token=owner.experts_per_token,
            take=lambda experts_LTK: self._take(table, experts_LTK),
        )
        progress = _Progress(
            [recorder] if self._trace is None else [recorder, self._trace],
            self._advance,
            num_layers=len(owner.moe_layers),
            total=num_tokens,
        )
        torch.set_num_threads(detect_machine().num_cores)
        return build_engine(
            Order(files=files, policy=policy, max_tokens=max_tokens, observer=progress),
            decoder=reader.tokenizer,
            end_tokens=frozenset(),
            job_seed=0,
        )

    # --- before the first pass ------------------------------------------------------------------

    def _reader(self, job: Job, files: ModelFiles) -> RowReader:
        shape = files.shape
        return prepare(job, vocab_size=shape.vocab_size, max_positions=shape.max_positions).reader

    def _sequences(self, reader: RowReader, files: ModelFiles) -> list[TokenSequence]:
        longest = min(SEQUENCE_TOKENS, files.shape.max_positions - 1)
        wanted = self._order.num_tokens
        sequences = read_sequences(
            self._order.text, reader, num_tokens=wanted, sequence_tokens=longest
        )
        found = _count(sequences)
        less = f", fewer than the {wanted} asked for" if found < wanted else ""
        self._tell(f"text: {found} tokens in {len(sequences)} sequences{less}")
        return sequences

    def _require_gating(self, files: ModelFiles, sequences: Sequence[TokenSequence]) -> None:
        if self._order.gating_loss is not None:
            require_learnable(
                files,
                num_unseen=len(_held_out(sequences)),
                longest=max(map(len, sequences)) + ANSWER_TOKENS,
                budget_bytes=self._order.dram_bytes or detect_machine().dram_bytes,
            )

    def _policy(
        self,
        job: Job,
        files: ModelFiles,
        table: PathTable,
        sequences: Sequence[TokenSequence],
    ) -> tuple[Policy, int]:
        """A policy within the budget, and the longest sequence with its one new token."""
        workload = Workload(
            num_sequences=len(sequences),
            mean_prompt_tokens=_count(sequences) / len(sequences),
            mean_new_tokens=1.0,
            max_total_tokens=max(map(len, sequences)) + 1,
        )
        profile, _ = machine_profile()  # its capacities count, not its rates
        problem = job_problem(job, files, workload, profile.hardware())
        shape, kept = files.shape, 1.0 if self._order.trace else HELD_OUT_SHARE
        choices = kept * _count(sequences) * len(shape.moe_layers) * shape.experts_per_token
        held = problem.program_bytes["dram"] + table.num_bytes + round(choices * 2)
        try:
            problem_of_text = replace(problem, program_bytes={"dram": held}, kv_on_disk=False)
            policy = reading_policy(problem_of_text)
        except DoesNotFit as error:
            raise DoesNotFit(f"{error}\nFor a calibration resources.dram is --dram.") from None
        self._tell(f"policy: {policy}")
        return policy, workload.max_total_tokens

    # --- the passes -----------------------------------------------------------------------------

    def _run(
        self,
        built: BuiltEngine,
        table: PathTable,
        owner: ModelOwner,
        sequences: Sequence[TokenSequence],
    ) -> CalibrationSummary:
        begun = time.perf_counter()
        held_out = _held_out(sequences)
        num_counted = len(sequences) - len(held_out)
        counted = sequences[:num_counted]
        try:
            self._read(built, counted, first=0)
            # Not the tokens of those sequences: what they have in common was computed once.
            self._num_known = 0 if self._trace is None else len(self._trace)
            self._num_counted, self._counting = len(self._recorded), False
            self._read(built, held_out, first=num_counted)
        finally:
            built.close()
        run_s = time.perf_counter() - begun
        self._popular_LE = table.counts[0][:, 0].copy()
        unseen = self._recorded[self._num_counted :]
        comparisons = compare(table, unseen) if unseen else ()
        for experts_LTK in unseen:
            table.add_pass(experts_LTK)
        self._write(replace(table, num_tokens=_count(sequences)), owner)
        return CalibrationSummary(
            table=self._order.table,
            trace=self._order.trace,
            num_sequences=len(sequences),
            num_tokens=_count(sequences),
            num_held_out=_count(held_out),
            num_passes=built.engine.statistics.num_passes,
            run_s=run_s,
            comparisons=comparisons,
        )

    def _teach(
        self,
        summary: CalibrationSummary,
        trace: HiddenTrace,
        files: ModelFiles,
        owner: ModelOwner,
    ) -> CalibrationSummary:
        """Has the predictors that were asked for learn from what was read."""
        begun = time.perf_counter()
        return_freed_memory()
        num_known = self._num_known
        if len(trace) <= num_known:  # nothing of what was held out was kept
            num_known = round(len(trace) * (1 - HELD_OUT_SHARE))
        teacher = Teacher(
            owner=owner,
            gates_LED=[gate.float() for gate in load_gates(files)],
            vocab_size=files.shape.vocab_size,
            known=trace.part(0, num_known),
            unseen=trace.part(num_known, len(trace)),
        )
        names = ", ".join(sorted(self._order.predictors))
        self._tell(f"learning from {len(teacher.known)} tokens: {names}")
        lessons = teacher.teach(self._order.predictors, self._order.table.parent, self._advance)
        return replace(summary, lessons=tuple(lessons), learn_s=time.perf_counter() - begun)

    def _teach_gating(
        self,
        summary: CalibrationSummary,
        files: ModelFiles,
        sequences: Sequence[TokenSequence],
        wanted_loss: float,
    ) -> CalibrationSummary:
        """Learns how much gates may leave out."""
        return_freed_memory()
        held_out = _held_out(sequences)
        self._tell(f"learning what gates may leave out for {wanted_loss:.3g} of perplexity")
        teacher = GatingTeacher(
            files,
            sequences[: len(sequences) - len(held_out)],
            held_out,
            are_prompts=not is_plain_text(self._order.text),
            advance=self._advance,
        )
        path = self._order.table.parent / GATING.file_name
        return replace(summary, gating=teacher.teach(path, wanted_loss=wanted_loss))

    def _write(self, table: PathTable, owner: ModelOwner) -> None:
        save_table(self._order.table, table, owner)
        if self._order.trace is not None:
            trace = trace_of(self._recorded, table)
            trace.save(self._order.trace, fingerprint=owner.fingerprint)

    def _read(self, built: BuiltEngine, sequences: Sequence[TokenSequence], *, first: int) -> None:
        with torch.inference_mode():
            for outcome in built.engine.run(_requests(sequences, first)):
                if outcome.error is not None:
                    raise CheckpointError(f"{self._order.model}: {outcome.error.message}")

    def _take(self, table: PathTable, experts_LTK: NDArray[np.integer]) -> None:
        if self._counting:
            table.add_pass(experts_LTK)
        if self._order.trace is not None or not self._counting:
            self._recorded.append(experts_LTK.astype(np.uint16, copy=True))


class _Progress:
    """Passes on what it observes and tells how far the text has been read."""

    def __init__(
        self,
        observers: Sequence[RoutingObserver],
        advance: Callable[[float], None],
        *,
        num_layers: int,
        total: int,
    ) -> None:
        self._observers = observers
        self._advance = advance
        self._steps = num_layers * total
        self._done = 0

    def begin_pass(self, num_rows: int, tokens: PassTokens | None = None) -> None:
        for observer in self._observers:
            observer.begin_pass(num_rows, tokens)

    def observe(
        self, layer: int, rows: slice, experts_RK: Chosen, hidden_RD: Tensor | None = None
    ) -> None:
        for observer in self._observers:
            observer.observe(layer, rows, experts_RK, hidden_RD)
        self._done += rows.stop - rows.start
        self._advance(min(1.0, self._done / self._steps))


def _require_places(order: CalibrationOrder) -> None:
    """Raises StorageError and ConfigError before anything is computed."""
    if order.model.is_dir():  # whoever opens it says what is wrong otherwise
        require_writable_file(order.table)
    if order.trace is None:
        return
    require_writable_file(order.trace)
    if order.trace.absolute() == order.table.absolute():
        fault = Fault(file="--trace", message="is where the table goes; give another place")
        raise ConfigError([fault])


def _pregates_of(
    order: CalibrationOrder,
    reader: RowReader,
    sequences: Sequence[TokenSequence],
    owner: ModelOwner,
) -> PreGateTeacher | None:
    """Who has gates learn to choose for later layers, if they are to. Raises InputError."""
    if order.activation_level is None:
        return None
    samples = samples_of(order.text, reader, sequences, longest=SEQUENCE_TOKENS)
    return PreGateTeacher.of(samples, owner, order.activation_level)


def _trace_beside(
    table: Path, owner: ModelOwner, files: ModelFiles, num_tokens: int
) -> HiddenTrace:
    """Room for what gates see. Raises StorageError."""
    try:
        table.parent.mkdir(parents=True, exist_ok=True)
        return HiddenTrace(
            table.parent,
            owner.moe_layers,
            hidden_size=files.shape.hidden_size,
            experts_per_token=owner.experts_per_token,
            most_tokens=num_tokens,
        )
    except OSError as error:
        message = f"{table.parent}: no room for what gates see: {error.strerror}"
        raise StorageError(message) from error


def _job(order: CalibrationOrder) -> Job:
    """A job of the same model, text and memory, for everything that is asked of jobs."""
    return Job(
        model=ModelSection(path=order.model),
        input=InputSection(path=order.text),
        output=OutputSection(path=order.table),
        resources=ResourcesSection(dram=order.dram_bytes),
    )


def _requests(sequences: Sequence[TokenSequence], first: int) -> Iterator[Request]:
    for index, tokens in enumerate(sequences, start=first):
        yield Request(index=index, custom_id=str(index), prompt_tokens=tokens, sampling=_READING)


def _held_out(sequences: Sequence[TokenSequence]) -> Sequence[TokenSequence]:
    """Those from which nothing is learnt before it was examined."""
    return sequences[len(sequences) - round(len(sequences) * HELD_OUT_SHARE) :]


def _count(sequences: Sequence[TokenSequence]) -> int:
    return sum(map(len, sequences))
