"""A text that is read portion by portion; whoever is broken off goes on behind the last whole one.

Shape letters: L MoE layers, N tokens that are kept, T tokens of a portion, K experts per token.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import moebatch
from moebatch.calibration.lessons import Advance, Lesson
from moebatch.calibration.placed_text import PlacedText
from moebatch.calibration.portion import Portion, portion, portions
from moebatch.calibration.reading_record import KeptLesson, ReadingRecord
from moebatch.checkpoint.fingerprint import weights_sample
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.engine import Engine
from moebatch.errors import CheckpointError
from moebatch.folder.work_folder import WorkFolder
from moebatch.job.fingerprint import numerics_fingerprint
from moebatch.predict.gate_trace import GateRecorder, GateTrace
from moebatch.predict.learn import Seen
from moebatch.predict.predictor import RoutingObserver
from moebatch.spec.policy import Policy, PredictorName
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling

_READING = Sampling(max_tokens=1, temperature=0.0)


class TextReading:
    """What gates say of a text, as far as it has been read, and who has learnt from it."""

    def __init__(
        self,
        folder: WorkFolder,
        text: PlacedText,
        files: ModelFiles,
        *,
        with_hidden: bool,
        tell: Callable[[str], None],
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
            content = folder.load()
            found = ReadingRecord.of(content) if content else new
            if found.fingerprint != fingerprint:
                raise CheckpointError(f"{folder.path}: is of another reading")
            self._trace = self._opened(with_hidden=with_hidden)
            self._require_whole(found)
        except CheckpointError as error:
            tell(f"{error}; the text is read from its beginning")
            folder.clear()
            self._trace, found = self._opened(with_hidden=with_hidden), new
        self._record = found
        if found.ends:
            tell(f"{self.num_kept} of {text.num_tokens} tokens have been read before")
        self._recorder = GateRecorder(self._trace, owner.moe_layers, text.places_of, advance)

    @property
    def observer(self) -> RoutingObserver:
        """To be told of all passes that read."""
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
        with torch.inference_mode():
            for each in portions(self.text, policy, first=self._record.num_sequences):
                self._recorder.begin(each.places)
                for outcome in engine.run(self._requests(each)):
                    if outcome.error is not None:
                        folder = self._files.checkpoint.folder
                        raise CheckpointError(f"{folder}: {outcome.error.message}")
                assert self._recorder.is_whole, "passes compute every token of a portion"
                checksum = self._trace.checksum(each.places)
                self._keep(self._record.with_portion(each.sequences.stop, checksum))

    # --- what has been read ---------------------------------------------------------------------

    @property
    def known(self) -> list[NDArray[np.uint16]]:
        """What was chosen in the text that is not held out, portion by portion, [L, T, K]."""
        return [self._chosen(one) for one in self._portions if not self._is_held_out(one)]

    @property
    def unseen(self) -> list[NDArray[np.uint16]]:
        """The same for what is held out."""
        return [self._chosen(one) for one in self._portions if self._is_held_out(one)]

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

    def lessons(self, files: dict[PredictorName, Path]) -> list[Lesson]:
        """What those have learnt from exactly this reading whose files are as they left them."""
        kept = self._record.lessons
        return [
            Lesson(name=name, file=file, accuracy=kept[name].accuracy)
            for name, file in files.items()
            if name in kept and kept[name].digest == _digest(file)
        ]

    def keep_lesson(self, lesson: Lesson) -> None:
        """Whoever has learnt all of it need not learn it again. Raises StorageError."""
        kept = KeptLesson(digest=_digest(lesson.file), accuracy=lesson.accuracy)
        self._keep(self._record.with_lesson(lesson.name, kept))

    def _keep(self, record: ReadingRecord) -> None:
        self._folder.save(record.content)
        self._record = record

    @property
    def _portions(self) -> Iterator[Portion]:
        return _portions_of(self.text, self._record.ends)

    def _chosen(self, one: Portion) -> NDArray[np.uint16]:
        return self._trace.experts_LNK[:, one.places.start : one.places.stop]

    def _is_held_out(self, one: Portion) -> bool:
        return one.sequences.start >= self.text.num_counted

    def _requests(self, one: Portion) -> Iterator[Request]:
        for number in one.sequences:
            tokens = self.text.sequences[number]
            name = str(number)
            yield Request(index=number, custom_id=name, prompt_tokens=tokens, sampling=_READING)

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
        kept = _portions_of(self.text, record.ends)
        for one, checksum in zip(kept, record.checksums, strict=True):
            if self._trace.checksum(one.places) != checksum:
                raise CheckpointError(f"{self._folder.path}: is damaged")


def _portions_of(text: PlacedText, ends: Sequence[int]) -> Iterator[Portion]:
    for first, end in zip([0, *ends], ends, strict=False):
        yield portion(text, range(first, end))


def _fingerprint(text: PlacedText, files: ModelFiles, *, with_hidden: bool) -> str:
    """Stands for everything that decides over what is kept at which place."""
    digest = hashlib.blake2b(digest_size=16)
    numerics, weights = numerics_fingerprint(files), weights_sample(files.checkpoint)
    digest.update(repr((moebatch.__version__, numerics, weights, with_hidden)).encode())
    for tokens in text.sequences:
        digest.update(np.array([len(tokens), *tokens], np.int64).tobytes())
    digest.update(text.places_S.tobytes())
    return digest.hexdigest()


def _digest(path: Path) -> str:
    """Of what a file holds; of none that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError:
        return ""
