"""What predictors learn from a trace, and how often each is right about tokens that it has not
seen.

Shape letters: L MoE layers, N tokens, D hidden, E experts, K experts per token.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moebatch.calibration.comparison import Comparison
from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.errors import ConfigError, Fault
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
    Embed,
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
    LEARNED,
    TOKENS,
    save_first_gate,
    save_learned,
    save_tokens,
)
from moebatch.predict.path_table import MAX_TABLE_BYTES
from moebatch.quoting import shown
from moebatch.spec.policy import PREDICTORS, PredictorName
from moebatch.units import format_bytes

LEARNING = tuple(name for name in PREDICTORS if name != "none")
LEARNT_FILES: Mapping[PredictorName, FileKind] = {
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
Advance = Callable[[float], None]


def parse_predictors(names: Iterable[str]) -> frozenset[PredictorName]:
    """Predictors by their names, or all that there are. Raises ConfigError for unknown names."""
    found: set[PredictorName] = set()
    for name in names:
        known = [each for each in LEARNING if name in (each, "all")]
        if not known:
            message = f"must be one of {', '.join(LEARNING)} or all, got {shown(name)}"
            raise ConfigError(
                [Fault(file="moebatch calibrate", where="--predictor", message=message)]
            )
        found.update(known)
    return frozenset(found) - {"correlation"}


def require_sizes(names: Collection[PredictorName], owner: ModelOwner, *, vocab_size: int) -> None:
    """Raises ConfigError, before anything is read, for what would take more memory than a hint
    may."""
    num_bytes = len(owner.moe_layers) * vocab_size * owner.num_experts * _SHARE_BYTES
    if "token" in names and num_bytes > MAX_TABLE_BYTES:
        message = (
            f"token would keep {format_bytes(num_bytes)} for {vocab_size} tokens of this model, at "
            f"most {format_bytes(MAX_TABLE_BYTES)} are kept in memory; name the others"
        )
        raise ConfigError([Fault(file="moebatch calibrate", where="--predictor", message=message)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """What a predictor has learnt, and what it is worth."""

    name: PredictorName
    file: Path
    accuracy: Mapping[int, float]
    """Of the K experts that it names for a token, the share that is chosen, by layer; layers of
    which it says nothing are left out. Empty if there was nothing to examine it on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """A model, and what its gates have seen and chosen."""

    owner: ModelOwner
    gates_LED: Sequence[Tensor]
    vocab_size: int
    embed: Embed
    known: Seen
    unseen: Seen
    """Held out."""
    effort: Effort = field(default_factory=Effort)

    def teach(
        self, names: Collection[PredictorName], folder: Path, advance: Advance
    ) -> Iterator[Lesson]:
        """Has predictors learn, one after the other, and writes what they know into `folder`;
        yields what each has learnt when its file is there. `advance` gets the share that is done.
        Raises StorageError."""
        ways: dict[PredictorName, Callable[[Path, Advance], Lesson]] = {
            "token": self._token,
            "next-gate": self._next_gate,
            "learned": self._learned,
        }
        wanted = [way for name, way in ways.items() if name in names]
        parts = _parts(advance, len(wanted))
        for way, part in zip(wanted, parts, strict=True):
            yield way(folder, part)

    def _token(self, folder: Path, advance: Advance) -> Lesson:
        shares_LVE = token_shares(
            self.known, num_experts=self.owner.num_experts, vocab_size=self.vocab_size
        )
        path = folder / TOKENS.file_name
        save_tokens(path, shares_LVE, self.owner)
        guesses = TokenGuesser(shares_LVE).from_tokens(KnownTokens(self._examined.tokens_N))
        found = {guess.position: guess.shares_RE for guess in guesses}
        return self._lesson("token", path, found)

    def _next_gate(self, folder: Path, advance: Advance) -> Lesson:
        first = learn_first_gate(self.known, self.gates_LED[0], effort=self.effort, advance=advance)
        path = folder / FIRST_GATE.file_name
        save_first_gate(path, first, self.owner)
        found = self._seen_by(GateGuesser(self.gates_LED, self.owner.experts_per_token))
        lesson = self._lesson("next-gate", path, found)
        accuracy = {**self._of_first_gate(first), **lesson.accuracy}
        return Lesson(name="next-gate", file=path, accuracy=dict(sorted(accuracy.items())))

    def _learned(self, folder: Path, advance: Advance) -> Lesson:
        known, num_layers = self.known, self.known.num_layers
        stride = min(STRIDE, num_layers)
        lessons = [examples_ahead(known, position, stride=stride) for position in range(num_layers)]
        lessons += [examples_of_beginning(known, each, self.embed) for each in range(stride)]
        parts = _parts(advance, len(lessons))
        perceptrons = [
            learn_perceptron(
                examples, num_experts=self.owner.num_experts, effort=self.effort, advance=part
            )
            for examples, part in zip(lessons, parts, strict=True)
        ]
        ahead, beginning = perceptrons[:num_layers], perceptrons[num_layers:]
        path = folder / LEARNED.file_name
        save_learned(
            path, LearnedGuesser(ahead, beginning, self.owner.experts_per_token), self.owner
        )
        accuracy: dict[int, float] = {}
        for position, perceptron in enumerate(ahead):
            examples = examples_ahead(self._examined, position, stride=stride)
            later = (position + stride) % num_layers
            accuracy |= self._right(later, examples, perceptron.logits)
        return Lesson(name="learned", file=path, accuracy=dict(sorted(accuracy.items())))

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
                found[guess.position] = guess.shares_RE
        return found

    def _of_first_gate(self, gate_ED: Tensor) -> dict[int, float]:
        examples = examples_ahead(self._examined, len(self.gates_LED) - 1, stride=1)
        return self._right(0, examples, partial(linear_of, gate_ED=gate_ED))

    def _right(
        self, position: int, examples: Examples, logits_of: Callable[[Tensor], Tensor]
    ) -> dict[int, float]:
        """How right somebody is about a position, by its layer; nothing without examples."""
        places_N = examples.places_N
        if not len(places_N):
            return {}
        logits_NE = logits_of(examples.input_of(places_N))
        shares_NE = top_shares(logits_NE, self.owner.experts_per_token)
        return {self.owner.moe_layers[position]: precision(shares_NE, examples.chosen_of(places_N))}

    def _lesson(self, name: PredictorName, path: Path, found: Mapping[int, Shares]) -> Lesson:
        examined = self._examined
        accuracy = {
            self.owner.moe_layers[position]: precision(shares_NE, examined.experts_LNK[position])
            for position, shares_NE in found.items()
            if len(examined)
        }
        return Lesson(name=name, file=path, accuracy=accuracy)


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


def _parts(advance: Advance, count: int) -> list[Advance]:
    """What each of several parts that follow each other tells its own share to."""
    return [partial(_tell_part, advance, number, count) for number in range(count)]


def _tell_part(advance: Advance, number: int, count: int, share: float) -> None:
    advance((number + share) / count)
