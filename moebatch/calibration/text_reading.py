"""A text that is read portion by portion; a calibration that was broken off goes on behind the last
whole one.

Shape letters: L MoE layers, N tokens that are kept, T tokens of a portion, K experts per token.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

import moebatch
from moebatch.advance import Advance
from moebatch.calibration.reading_policy import read_through
from moebatch.calibration.texts import PlacedText
from moebatch.checkpoint.fingerprint import file_digest
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.engine import Engine
from moebatch.errors import CheckpointError
from moebatch.folder.work_folder import WorkFolder
from moebatch.job.identity import numerics_fingerprint
from moebatch.predict.gate_trace import GateRecorder, GateTrace
from moebatch.predict.learn import Seen
from moebatch.predict.predictor import RoutingObserver
from moebatch.spec.policy.policy import Policy, PredictorName, pages_of


class KeptLesson(BaseModel):
    """What a predictor has learnt from a reading."""

    digest: str
    """Of its file."""
    accuracy: dict[int, float]
    """By layer."""


class ReadingRecord(BaseModel):
    """What has been read to its end, and what was learnt from all of it."""

    fingerprint: str
    """Of everything that decides over what is read."""
    ends: list[int] = []
    """Sequences up to the end of each portion."""
    checksums: list[int] = []
    """Of what was kept of each portion."""
    lessons: dict[str, KeptLesson] = {}

    @property
    def num_sequences(self) -> int:
        """Those that have been read."""
        return self.ends[-1] if self.ends else 0

    @property
    def portions(self) -> list[range]:
        """Sequences of each portion."""
        return [range(*pair) for pair in pairwise([0, *self.ends])]


class TextReading:
    """What gates say of a text, as far as it has been read, and who has learnt from it."""

    def __init__(
        self,
        folder: WorkFolder,
        text: PlacedText,
        files: ModelFiles,
        *,
        with_hidden: bool,
        log: Callable[[str], None],
        advance: Advance,
    ) -> None:
        """Goes on with what `folder`, which is locked, has of exactly this reading; anything else
        there is removed. `with_hidden` keeps what gates see, for those who learn from it.

        Raises StorageError.
        """
        self.text = text
        self._folder, self._files = folder, files
        fingerprint = _fingerprint(text, files, with_hidden=with_hidden)
        new = ReadingRecord(fingerprint=fingerprint)
        owner = files.owner
        try:
            found = folder.load(ReadingRecord) or new
            if found.fingerprint != fingerprint:
                raise CheckpointError(f"{folder.path}: is of another reading")
            self._trace = self._opened(with_hidden=with_hidden)
            self._require_whole(found)
        except CheckpointError as error:
            log(f"{error}; the text is read from its beginning")
            folder.clear()
            self._trace, found = self._opened(with_hidden=with_hidden), new
        self._record = found
        if found.ends:
            log(f"{self.num_kept} of {text.num_tokens} tokens have been read before")
        self._recorder = GateRecorder(self._trace, owner.moe_layers, text.places_of, advance)

    @property
    def observer(self) -> RoutingObserver:
        """Sees all passes that read."""
        return self._recorder

    @property
    def num_kept(self) -> int:
        """Tokens that need not be read again."""
        return self.text.place_behind(self._record.num_sequences)

    @property
    def is_over(self) -> bool:
        """Whether everything has been read."""
        return self._record.num_sequences == len(self.text.sequences)

    def go_on(self, engine: Engine, policy: Policy) -> None:
        """Reads what is left. Raises CheckpointError for weights that are no numbers, and
        StorageError."""
        folder = self._files.checkpoint.folder
        for portion in _portions(self.text, policy, first=self._record.num_sequences):
            places = self.text.places(portion)
            self._recorder.begin(places)
            read_through(engine, self.text.sequences, portion, folder=folder)
            assert self._recorder.is_whole, "passes compute every token of a portion"
            self._record.ends.append(portion.stop)
            self._record.checksums.append(self._trace.checksum(places))
            self._keep()

    # --- what has been read ---------------------------------------------------------------------

    def chosen(self, *, held_out: bool) -> list[NDArray[np.uint16]]:
        """What was chosen in the text that is held out, or in the rest, by portion, [L, T, K]."""
        found = []
        for portion in self._record.portions:
            if (portion.start >= self.text.num_counted) == held_out:
                places = self.text.places(portion)
                found.append(self._trace.experts_LNK[:, places.start : places.stop])
        return found

    @property
    def num_seen(self) -> int:
        """Tokens, the first ones, of which is kept what gates have seen."""
        return min(self._trace.num_hidden, self.num_kept)

    def seen(self, places: range) -> Seen:
        """Some of these tokens."""
        some = slice(places.start, places.stop)
        return Seen(
            hidden_LND=self._trace.hidden_LND[:, some],
            experts_LNK=self._trace.experts_LNK[:, some],
            tokens_N=self.text.tokens_N[some],
            is_first_N=self.text.is_first_N[some],
        )

    # --- what was learnt from it ----------------------------------------------------------------

    def kept_accuracy(self, name: PredictorName, file: Path) -> Mapping[int, float] | None:
        """How right a predictor was when it had learnt from exactly this reading; None if it has
        not, or its file is not as it left it."""
        kept = self._record.lessons.get(name)
        return kept.accuracy if kept is not None and kept.digest == file_digest(file) else None

    def keep_lesson(self, name: PredictorName, file: Path, accuracy: Mapping[int, float]) -> None:
        """A predictor that has learnt all of it need not learn it again. Raises StorageError."""
        kept = KeptLesson(digest=file_digest(file), accuracy=dict(accuracy))
        self._record.lessons[name] = kept
        self._keep()

    def _keep(self) -> None:
        self._folder.save(self._record)

    def _opened(self, *, with_hidden: bool) -> GateTrace:
        owner, shape = self._files.owner, self._files.shape
        return GateTrace(
            self._folder.path,
            num_layers=len(owner.moe_layers),
            num_tokens=self.text.num_tokens,
            experts_per_token=owner.experts_per_token,
            hidden_size=shape.hidden_size if with_hidden else 0,
        )

    def _require_whole(self, record: ReadingRecord) -> None:
        """Raises CheckpointError unless everything is there that a record names."""
        for portion, checksum in zip(record.portions, record.checksums, strict=True):
            if self._trace.checksum(self.text.places(portion)) != checksum:
                raise CheckpointError(f"{self._folder.path}: is damaged")


def _portions(text: PlacedText, policy: Policy, *, first: int) -> Iterator[range]:
    """The sequences from `first` on, in portions of about a full pass of the policy, the held-out
    ones apart from the others."""
    while first < len(text.sequences):
        last = text.num_counted if first < text.num_counted else len(text.sequences)
        end = first + _num_fitting(text, policy, range(first, last))
        yield range(first, end)
        first = end


def _fingerprint(text: PlacedText, files: ModelFiles, *, with_hidden: bool) -> str:
    """Stands for everything that decides over what is kept at which place."""
    digest = hashlib.blake2b(digest_size=16)
    numerics, weights = numerics_fingerprint(files), files.sample
    digest.update(repr((moebatch.__version__, numerics, weights, with_hidden)).encode())
    for tokens in text.sequences:
        digest.update(np.array([len(tokens), *tokens], np.int64).tobytes())
    digest.update(text.places_S.tobytes())
    return digest.hexdigest()


def _num_fitting(text: PlacedText, policy: Policy, sequences: range) -> int:
    """How many of them, at least one, have room in a pass: all of their tokens, the sequences
    themselves, and their keys."""
    most_places = text.place_behind(sequences.start) + policy.tokens_per_pass
    num_pages = 0
    for count, number in enumerate(sequences[: policy.batch_size]):
        num_pages += pages_of(len(text.sequences[number]) + 1)
        is_over = num_pages > policy.num_kv_pages or text.ends[number] > most_places
        if count and is_over:
            return count
    return min(len(sequences), policy.batch_size)
