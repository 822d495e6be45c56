"""What predictors learn from a trace, and how often each is right about tokens that it has not
seen.

Shape letters: L MoE layers, N tokens, D hidden, E experts, K experts per token.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moebatch.advance import Advance, parts_of
from moebatch.arrays import Ints
from moebatch.calibration.counting import Comparison
from moebatch.calibration.order import CalibrationOrder
from moebatch.calibration.text_reading import TextReading
from moebatch.calibration.texts import HELD_OUT_SHARE
from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.errors import CheckpointError, ConfigError
from moebatch.model.routing.gates import Gate
from moebatch.predict.array_file import FileKind
from moebatch.predict.guesser import (
    GateGuesser,
    KnownTokens,
    LearnedGuesser,
    Shares,
    TokenGuesser,
    linear_of,
    top_shares,
)
from moebatch.predict.learn import (
    Effort,
    Examples,
    Seen,
    examples_ahead,
    examples_of_beginning,
    learn_first_gate,
    learn_perceptron,
    precision,
    token_shares,
)
from moebatch.predict.learnt_files import (
    FIRST_GATE,
    HABITS,
    LEARNED,
    TOKENS,
    load_habits,
    save_learned,
)
from moebatch.predict.path_table import MAX_TABLE_BYTES
from moebatch.spec.policy.policy import PredictorName
from moebatch.store.dense import load_embedded
from moebatch.store.memory import return_freed_memory
from moebatch.units import format_bytes

Accuracy = Mapping[int, float]
"""Of the experts that a predictor names for a token, the share that is chosen, by layer."""
_FILES: Mapping[PredictorName, FileKind] = {
    "token": TOKENS,
    "next-gate": FIRST_GATE,
    "learned": LEARNED,
}
"""Where those that learn beside the table keep what they know, in the order in which they do."""
STRIDE = 2
"""Layers ahead of a learned predictor: what it foresees has the time of a whole layer to come."""
_SHARE_BYTES = 2
_MOST_EXAMINED = 8192
"""Unseen tokens on which a predictor is examined."""


def require_sizes(names: Collection[PredictorName], owner: ModelOwner, *, vocab_size: int) -> None:
    """Raises ConfigError, before anything is read, for what would take more memory than a hint
    may."""
    num_bytes = len(owner.moe_layers) * vocab_size * owner.num_experts * _SHARE_BYTES
    if "token" in names and num_bytes > MAX_TABLE_BYTES:
        message = (
            f"token would keep {format_bytes(num_bytes)} for {vocab_size} tokens of this model, at "
            f"most {format_bytes(MAX_TABLE_BYTES)} are kept in memory; name the others"
        )
        raise ConfigError.at("moebatch calibrate", message, where="--predictor")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """What a predictor has learnt, and what it is worth."""

    name: PredictorName
    file: Path
    accuracy: Accuracy
    """Layers of which it says nothing are left out. Empty if there was nothing to examine it on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """A model, and what its gates have seen and chosen."""

    files: ModelFiles
    known: Seen
    unseen: Seen
    """Held out."""
    advance: Advance
    effort: Effort = field(default_factory=Effort)

    @classmethod
    def of(cls, reading: TextReading, files: ModelFiles, advance: Advance) -> "Teacher":
        """Of a text that has been read."""
        num_known, num_seen = reading.text.num_known, reading.num_seen
        if num_seen <= num_known:  # nothing of what was held out was kept
            num_known = round(num_seen * (1 - HELD_OUT_SHARE))
        known, unseen = reading.seen(range(num_known)), reading.seen(range(num_known, num_seen))
        return cls(files=files, known=known, unseen=unseen, advance=advance)

    @property
    def owner(self) -> ModelOwner:
        """What files of predictors belong to."""
        return self.files.owner

    def teach(self, name: PredictorName, path: Path) -> Accuracy:
        """Has a predictor learn, writes what it knows, and finds out how right that is about what
        is held out. Raises StorageError."""
        ways = {"token": self._token, "next-gate": self._next_gate, "learned": self._learned}
        return ways[name](path)

    def _token(self, path: Path) -> Accuracy:
        """How often experts are chosen for each token."""
        shares_LVE = token_shares(
            self.known,
            num_experts=self.owner.num_experts,
            vocab_size=self.files.shape.vocab_size,
        )
        TOKENS.save(path, self.owner, {"shares": shares_LVE})
        guesses = TokenGuesser(shares_LVE).from_tokens(KnownTokens(self._examined.tokens_N))
        return self._accuracy({guess.position: guess.shares_RE[:] for guess in guesses})

    def _next_gate(self, path: Path) -> Accuracy:
        """A gate for the first layer; the gates of all others are there."""
        gates = Gate.all_of(self.files, torch.float32)
        first_ED = learn_first_gate(
            self.known,
            gates[0],
            num_experts=self.owner.num_experts,
            effort=self.effort,
            advance=self.advance,
        )
        FIRST_GATE.save(path, self.owner, {"gate": first_ED.to(torch.float16).numpy()})
        examples = examples_ahead(self._examined, len(gates) - 1, stride=1)
        of_first = self._right(0, examples, partial(linear_of, gate_ED=first_ED))
        found = self._seen_by(GateGuesser(gates, self.owner.experts_per_token))
        return dict(sorted({**of_first, **self._accuracy(found)}.items()))

    def _learned(self, path: Path) -> Accuracy:
        """A perceptron for each layer, `STRIDE` ahead, and for the first layers of a pass."""
        known, num_layers = self.known, self.known.num_layers
        stride, embed = min(STRIDE, num_layers), TextEmbedding(self.files, known.tokens_N)
        lessons = [examples_ahead(known, position, stride=stride) for position in range(num_layers)]
        lessons += [examples_of_beginning(known, each, embed) for each in range(stride)]
        perceptrons = [
            learn_perceptron(
                examples, num_experts=self.owner.num_experts, effort=self.effort, advance=part
            )
            for examples, part in zip(lessons, parts_of(self.advance, len(lessons)), strict=True)
        ]
        ahead, beginning = perceptrons[:num_layers], perceptrons[num_layers:]
        guesser = LearnedGuesser(ahead, beginning, self.owner.experts_per_token)
        save_learned(path, guesser, self.owner)
        accuracy: dict[int, float] = {}
        for position, perceptron in enumerate(ahead):
            examples = examples_ahead(self._examined, position, stride=stride)
            later = (position + stride) % num_layers
            accuracy |= self._right(later, examples, perceptron.logits)
        return dict(sorted(accuracy.items()))

    # --- the examination ------------------------------------------------------------------------

    @property
    def _examined(self) -> Seen:
        unseen, most = self.unseen, min(len(self.unseen), _MOST_EXAMINED)
        return Seen(
            hidden_LND=unseen.hidden_LND[:, :most],
            experts_LNK=unseen.experts_LNK[:, :most],
            tokens_N=unseen.tokens_N[:most],
            is_first_N=unseen.is_first_N[:most],
        )

    def _seen_by(self, guesser: GateGuesser) -> dict[int, Shares]:
        """The guesses of all layers."""
        found = {}
        for position, hidden_ND in enumerate(self._examined.hidden_LND):
            seen = torch.from_numpy(hidden_ND.astype(np.float32))
            for guess in guesser.from_hidden(position, seen):
                found[guess.position] = guess.shares_RE[:]
        return found

    def _right(
        self, position: int, examples: Examples, logits_of: Callable[[Tensor], Tensor]
    ) -> dict[int, float]:
        """How right a guesser is about a position, by its layer; nothing without examples."""
        places_N = examples.places_N
        if not len(places_N):
            return {}
        logits_NE = logits_of(examples.input_of(places_N))
        shares_NE = top_shares(logits_NE, self.owner.experts_per_token)
        return {self.owner.moe_layers[position]: precision(shares_NE, examples.chosen_of(places_N))}

    def _accuracy(self, found: Mapping[int, Shares]) -> Accuracy:
        examined = self._examined
        return {
            self.owner.moe_layers[position]: precision(shares_NE, examined.experts_LNK[position])
            for position, shares_NE in found.items()
            if len(examined)
        }


def teach_predictors(
    order: CalibrationOrder,
    reading: TextReading,
    files: ModelFiles,
    log: Callable[[str], None],
    advance: Advance,
) -> tuple[Lesson, ...]:
    """What all predictors that are ordered have learnt: those that have not yet, learn one after
    the other, and each is kept as soon as it has. `advance` gets the share that is done. Raises
    StorageError."""
    return_freed_memory()
    paths = {
        name: kind.beside(order.table) for name, kind in _FILES.items() if name in order.predictors
    }
    known = {name: reading.kept_accuracy(name, path) for name, path in paths.items()}
    missing = [name for name, accuracy in known.items() if accuracy is None]
    if missing:
        teacher = Teacher.of(reading, files, advance)
        log(f"learning from {len(teacher.known)} tokens: {', '.join(missing)}")
    for name, part in zip(missing, parts_of(advance, len(missing)), strict=True):
        known[name] = accuracy = replace(teacher, advance=part).teach(name, paths[name])
        reading.keep_lesson(name, paths[name], accuracy)
    return tuple(
        Lesson(name=name, file=paths[name], accuracy=accuracy or {})
        for name, accuracy in known.items()
    )


class TextEmbedding:
    """What a model makes of the tokens of a text before its first layer; read when it is first
    asked, since a text has a part of the vocabulary: U different tokens."""

    def __init__(self, files: ModelFiles, tokens_N: Ints) -> None:
        self._files = files
        self._tokens_U = np.unique(tokens_N)

    def __call__(self, tokens_N: Ints) -> Tensor:
        """Of tokens of that text, [N, D]. Raises StorageError."""
        return self._embedded_UD[torch.from_numpy(np.searchsorted(self._tokens_U, tokens_N))]

    @cached_property
    def _embedded_UD(self) -> Tensor:
        return load_embedded(self._files, self._tokens_U.tolist())


def accuracies(
    comparisons: Sequence[Comparison], lessons: Iterable[Lesson]
) -> dict[PredictorName, tuple[float, ...]]:
    """Of every predictor that was examined, by layer; of one that says nothing of a layer, that of
    the frequencies which stand in for it."""
    one_token = next(one for one in comparisons if one.group_tokens == 1)
    usual = {layer.layer: layer.hot for layer in one_token.marginal}
    found: dict[PredictorName, tuple[float, ...]] = {
        "none": tuple(usual.values()),
        "correlation": tuple(layer.hot for layer in one_token.correlation),
    }
    for lesson in lessons:
        found[lesson.name] = tuple({**usual, **lesson.accuracy}.values())
    return found


def earlier_accuracies(
    order: CalibrationOrder, owner: ModelOwner
) -> dict[PredictorName, tuple[float, ...]]:
    """Of predictors that learnt in an earlier calibration, as they were examined there, by layer;
    those that are not to learn now, and whose files still lie beside the table."""
    try:
        habits = load_habits(HABITS.beside(order.table), owner)
    except CheckpointError:  # there are none, or they are of no use
        return {}
    kept = {name: kind for name, kind in _FILES.items() if name not in order.predictors}
    return {
        name: habits.accuracy[name]
        for name, kind in kept.items()
        if name in habits.accuracy and kind.is_of(kind.beside(order.table))
    }
