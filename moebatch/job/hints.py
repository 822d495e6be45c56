"""What earlier runs have learnt of a model's routing, if anything lies beside it."""

from collections.abc import Callable, Mapping

from moebatch.engine.model_files import ModelFiles, load_gates
from moebatch.errors import CheckpointError
from moebatch.predict.correlation import CorrelationPredictor
from moebatch.predict.guesser import FirstGateGuesser, GateGuesser, Guesser
from moebatch.predict.guessing import GuessingPredictor
from moebatch.predict.learnt_files import (
    FIRST_GATE,
    LEARNED,
    TOKENS,
    load_first_gate,
    load_learned,
    load_tokens,
)
from moebatch.predict.owner import ModelOwner
from moebatch.predict.path_table import PathTable
from moebatch.predict.predictor import Predictor
from moebatch.predict.table_file import TABLE, empty_table, load_table
from moebatch.spec.job import Job
from moebatch.store.fingerprint import checkpoint_fingerprint


def load_predictor(job: Job, files: ModelFiles) -> tuple[Predictor | None, tuple[str, ...]]:
    """The predictor of a job with what `moebatch calibrate` has left beside the model, and
    warnings.

    None is one that learns as it goes. A table of no use is left aside with a warning where nobody
    has asked for it: it only says what to load early. Raises CheckpointError where somebody has.
    """
    name = job.experts.predictor
    if name == "none":
        return None, ()
    hints = _Hints(job, files)
    if name != "auto":
        return hints.predictor(name), ()
    if not TABLE.path(job.model.path).is_file():
        return None, ()
    try:
        return hints.predictor("correlation"), ()
    except CheckpointError as error:
        return None, (f"going on without the correlation table: {error}",)


class _Hints:
    """The files beside a model."""

    def __init__(self, job: Job, files: ModelFiles) -> None:
        self._folder = job.model.path
        self._files = files
        fingerprint = checkpoint_fingerprint(files.config, files.checkpoint)
        self._owner = ModelOwner.of(self._folder, fingerprint, files.shape)

    def predictor(self, name: str) -> Predictor:
        """The one of that name. Raises CheckpointError if its file is missing or stale."""
        if name == "correlation":
            return CorrelationPredictor(load_table(TABLE.path(self._folder), self._owner))
        guessers: Mapping[str, Callable[[], list[Guesser]]] = {
            "token": lambda: [self._tokens()],
            "next-gate": lambda: [self._gates(), self._first_gate()],
            "learned": self._learned_and_nearer,
        }
        rest = CorrelationPredictor(self._frequencies())
        return GuessingPredictor(guessers[name](), rest, moe_layers=self._owner.moe_layers)

    def _tokens(self) -> Guesser:
        vocab_size = self._files.shape.vocab_size
        return load_tokens(TOKENS.path(self._folder), self._owner, vocab_size=vocab_size)

    def _gates(self, num_layers: int | None = None) -> Guesser:
        """Of all layers, or of the first ones."""
        gates_LED = load_gates(self._files)[:num_layers]
        return GateGuesser(gates_LED, self._owner.experts_per_token)

    def _learned_and_nearer(self) -> list[Guesser]:
        """What has been learnt, and gates for the layers that are too near the first one."""
        hidden_size = self._files.shape.hidden_size
        path = LEARNED.path(self._folder)
        learned = load_learned(path, self._owner, hidden_size=hidden_size)
        return [self._gates(learned.stride), learned, self._first_gate()]

    def _first_gate(self) -> Guesser:
        hidden_size = self._files.shape.hidden_size
        path = FIRST_GATE.path(self._folder)
        gate_ED = load_first_gate(path, self._owner, hidden_size=hidden_size)
        num_layers = len(self._owner.moe_layers)
        return FirstGateGuesser(gate_ED, num_layers, self._owner.experts_per_token)

    def _frequencies(self) -> PathTable:
        """How often each expert was chosen: as it was counted, else as it will be."""
        path = TABLE.path(self._folder)
        if path.is_file():
            return load_table(path, self._owner).shortened(0)
        return empty_table(self._owner, 0)
