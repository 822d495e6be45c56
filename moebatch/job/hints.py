"""What earlier runs have learnt of a model's routing, if anything lies beside it."""

from dataclasses import replace
from functools import cached_property

import numpy as np
from torch import Tensor

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.errors import CheckpointError
from moebatch.layout.habits import Habits
from moebatch.layout.placed import Hottest
from moebatch.model.routing.gates import Gate
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
from moebatch.spec.policy.policy import PredictorName


class Hints:
    """What is known of a model, what its job wants done with it, and the files beside the model."""

    def __init__(self, job: Job, files: ModelFiles) -> None:
        """Files of no use are left aside with a warning where the job does not name them: they
        only say what to load early and what to keep. Raises CheckpointError where it does."""
        asked = job.experts
        self._folder, self._files, self._owner = job.model.folder, files, files.owner
        self.warnings: list[str] = []
        self.wishes = Wishes(
            predictor=None if asked.predictor == "auto" else asked.predictor, cache=asked.cache
        )
        self.hottest = self._hottest()
        """Experts by layer, those that were chosen most often first."""
        if self.wishes.predictor is not None:
            self.predictor(self.wishes.predictor)
        self.habits = self._habits(must=asked.cache == "dp")

    def resolved(self, name: PredictorName | None) -> PredictorName:
        """The predictor that a policy means: without a name the table, if there is one."""
        if name is None:
            return "none" if self.hottest is None else "correlation"
        return name

    def predictor(self, name: PredictorName) -> Predictor | None:
        """The one of that name; None is one that learns as it goes.

        Raises CheckpointError if its file is missing or stale.
        """
        if name == "none":
            return None
        if name == "correlation":
            return CorrelationPredictor(self._table)
        rest = CorrelationPredictor(self._frequencies())
        return GuessingPredictor(self._guessers(name), rest, moe_layers=self._owner.moe_layers)

    def _guessers(self, name: PredictorName) -> list[Guesser]:
        learnt = self._learnt(name)
        if isinstance(learnt, Guesser):
            return [learnt]
        count, num_layers = self._owner.experts_per_token, len(self._owner.moe_layers)
        gates = GateGuesser(Gate.all_of(self._files, self._files.dtype), count)
        return [gates, FirstGateGuesser(learnt, num_layers, count)]

    def _learnt(self, name: PredictorName) -> Guesser | Tensor:
        """What a predictor that looks at tokens has in its file; of the next gates, the first
        one."""
        folder, owner, shape = self._folder, self._owner, self._files.shape
        if name == "token":
            return load_tokens(TOKENS.path(folder), owner, vocab_size=shape.vocab_size)
        if name == "learned":
            return load_learned(LEARNED.path(folder), owner, hidden_size=shape.hidden_size)
        return load_first_gate(FIRST_GATE.path(folder), owner, hidden_size=shape.hidden_size)

    def _require(self, name: PredictorName) -> None:
        """Raises CheckpointError if the file of a predictor is missing or stale."""
        if name == "correlation":
            _ = self._table
        elif name != "none":
            self._learnt(name)

    @cached_property
    def _table(self) -> PathTable:
        return load_table(TABLE.path(self._folder), self._owner)

    def _habits(self, *, must: bool) -> Habits | None:
        """What is known of the routing. Raises CheckpointError where there `must` be something."""
        path = HABITS.path(self._folder)
        if not must and not path.is_file():
            return None
        try:
            habits = load_habits(path, self._owner)
        except CheckpointError as error:
            if must:
                raise
            self.warnings.append(f"planning without the model's habits: {error}")
            return None
        return habits if self.wishes.predictor else self._of_use(habits)

    def _of_use(self, habits: Habits) -> Habits:
        """Without what is known of predictors whose files are of no use: the planner would choose
        one that no run can have."""
        accuracy = {}
        for name, of_layers in habits.accuracy.items():
            try:
                self._require(name)
            except CheckpointError as error:
                self.warnings.append(f"planning without the predictor {name}: {error}")
            else:
                accuracy[name] = of_layers
        return replace(habits, accuracy=accuracy)

    def _hottest(self) -> Hottest | None:
        if not TABLE.path(self._folder).is_file():
            return None
        try:
            counts_LE = self._table.counts[0][:, 0]
        except CheckpointError as error:
            self.warnings.append(f"going on without the correlation table: {error}")
            return None
        order_LE = np.argsort(-counts_LE.astype(np.int64), axis=1, kind="stable")
        return dict(zip(self._owner.moe_layers, order_LE.tolist(), strict=True))

    def _frequencies(self) -> PathTable:
        """How often each expert was chosen: as it was counted, else as it will be."""
        if self.hottest is None:  # there is no table, or it is of no use
            return empty_table(self._owner, 0)
        return self._table.without_paths()
