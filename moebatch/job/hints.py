"""What earlier runs have learnt of a model's routing, if anything lies beside it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.errors import CheckpointError
from moebatch.layout.habits import Habits
from moebatch.layout.setup import Hottest
from moebatch.plan.expert_choice import Wishes
from moebatch.predict.correlation import CorrelationPredictor
from moebatch.predict.guesser import FirstGateGuesser, GateGuesser, Guesser
from moebatch.predict.guessing import GuessingPredictor
from moebatch.predict.learnt_files import (
    FIRST_GATE,
    HABITS,
    LEARNED,
    TABLE,
    TOKENS,
    empty_table,
    load_first_gate,
    load_habits,
    load_learned,
    load_table,
    load_tokens,
)
from moebatch.predict.path_table import PathTable
from moebatch.predict.predictor import Predictor
from moebatch.spec.job import Job
from moebatch.spec.policy import PredictorName
from moebatch.store.dense import load_gates


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What is known of a model, and what its job wants done with it."""

    wishes: Wishes
    habits: Habits | None
    hottest: Hottest | None
    """Experts by layer, those that were chosen most often first."""
    warnings: tuple[str, ...]
    _beside: "_Beside"

    def resolved(self, name: PredictorName | None) -> PredictorName:
        """The predictor that a policy means: without a name the table, if there is one."""
        if name is None:
            return "none" if self.hottest is None else "correlation"
        return name

    def predictor(self, name: PredictorName) -> Predictor | None:
        """The one of that name; None is one that learns as it goes.

        Raises CheckpointError if the file of one that was asked for is missing or stale.
        """
        return self._beside.predictor(name)


def load_hints(job: Job, files: ModelFiles) -> Hints:
    """What `moebatch calibrate` has left beside the model of a job.

    Files of no use are left aside with a warning where nobody has asked for them: they only say
    what to load early and what to keep. Raises CheckpointError where somebody has.
    """
    beside, asked = _Beside(job, files), job.experts
    wishes = Wishes(
        predictor=None if asked.predictor == "auto" else asked.predictor, cache=asked.cache
    )
    if wishes.predictor is not None:
        beside.predictor(wishes.predictor)
    warnings: list[str] = []
    habits = beside.habits(warnings, must=asked.cache == "dp")
    return Hints(
        wishes=wishes,
        habits=habits,
        hottest=beside.hottest(warnings),
        warnings=tuple(warnings),
        _beside=beside,
    )


class _Beside:
    """The files beside a model."""

    def __init__(self, job: Job, files: ModelFiles) -> None:
        self._folder = job.model.path
        self._files = files
        self._owner = files.owner

    @cached_property
    def _table(self) -> PathTable:
        """Raises CheckpointError if it is missing or stale."""
        return load_table(TABLE.path(self._folder), self._owner)

    def habits(self, warnings: list[str], *, must: bool) -> Habits | None:
        """What is known of the routing. Raises CheckpointError where there `must` be something."""
        path = HABITS.path(self._folder)
        if not must and not path.is_file():
            return None
        try:
            return load_habits(path, self._owner)
        except CheckpointError as error:
            if must:
                raise
            warnings.append(f"planning without the model's habits: {error}")
            return None

    def hottest(self, warnings: list[str]) -> Hottest | None:
        """Experts by how often they were chosen, if that is known."""
        if not TABLE.path(self._folder).is_file():
            return None
        try:
            counts_LE = self._table.counts[0][:, 0]
        except CheckpointError as error:
            warnings.append(f"going on without the correlation table: {error}")
            return None
        order_LE = np.argsort(-counts_LE.astype(np.int64), axis=1, kind="stable")
        return dict(zip(self._owner.moe_layers, order_LE.tolist(), strict=True))

    def predictor(self, name: PredictorName) -> Predictor | None:
        """The one of that name. Raises CheckpointError if its file is missing or stale."""
        if name == "none":
            return None
        if name == "correlation":
            return CorrelationPredictor(self._table)
        guessers: Mapping[str, Callable[[], list[Guesser]]] = {
            "token": lambda: [self._tokens()],
            "next-gate": lambda: [self._gates(), self._first_gate()],
            "learned": lambda: [self._learned()],
        }
        rest = CorrelationPredictor(self._frequencies())
        return GuessingPredictor(guessers[name](), rest, moe_layers=self._owner.moe_layers)

    def _tokens(self) -> Guesser:
        vocab_size = self._files.shape.vocab_size
        return load_tokens(TOKENS.path(self._folder), self._owner, vocab_size=vocab_size)

    def _gates(self) -> Guesser:
        return GateGuesser(load_gates(self._files), self._owner.experts_per_token)

    def _learned(self) -> Guesser:
        path, hidden_size = LEARNED.path(self._folder), self._files.shape.hidden_size
        return load_learned(path, self._owner, hidden_size=hidden_size)

    def _first_gate(self) -> Guesser:
        hidden_size = self._files.shape.hidden_size
        path = FIRST_GATE.path(self._folder)
        gate_ED = load_first_gate(path, self._owner, hidden_size=hidden_size)
        num_layers = len(self._owner.moe_layers)
        return FirstGateGuesser(gate_ED, num_layers, self._owner.experts_per_token)

    def _frequencies(self) -> PathTable:
        """How often each expert was chosen: as it was counted, else as it will be."""
        if TABLE.path(self._folder).is_file():
            return self._table.shortened(0)
        return empty_table(self._owner, 0)
