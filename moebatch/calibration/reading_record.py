"""How far a calibration has come: one small file that says what beside it can be believed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

from moebatch.errors import CheckpointError
from moebatch.spec.policy import PredictorName
from moebatch.spec.text_file import write_text


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptLesson:
    """What a predictor has learnt from a reading."""

    digest: str
    """Of its file."""
    accuracy: Mapping[int, float]
    """By layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingRecord:
    """What has been read to its end, and what was learnt from all of it."""

    fingerprint: str
    """Of everything that decides over what is read."""
    ends: Sequence[int] = ()
    """Sequences up to the end of each portion."""
    checksums: Sequence[int] = ()
    """Of what was kept of each portion."""
    lessons: Mapping[PredictorName, KeptLesson] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        """Those that have been read."""
        return self.ends[-1] if self.ends else 0

    def with_portion(self, end: int, checksum: int) -> "ReadingRecord":
        """One portion further."""
        return replace(self, ends=[*self.ends, end], checksums=[*self.checksums, checksum])

    def with_lesson(self, name: PredictorName, lesson: KeptLesson) -> "ReadingRecord":
        """Another predictor has learnt."""
        return replace(self, lessons={**self.lessons, name: lesson})

    def save(self, path: Path) -> None:
        """Takes the place of an earlier one in a single step. Raises StorageError."""
        content = {
            "fingerprint": self.fingerprint,
            "ends": self.ends,
            "checksums": self.checksums,
            "lessons": {
                name: {"digest": lesson.digest, "accuracy": list(lesson.accuracy.items())}
                for name, lesson in self.lessons.items()
            },
        }
        text = json.dumps(content)
        write_text(path, f"{crc32(text.encode()):08x} {text}\n")

    @classmethod
    def load(cls, path: Path) -> "ReadingRecord | None":
        """The one that is there, if any. Raises CheckpointError if it is damaged."""
        try:
            checksum, text = path.read_text().rstrip("\n").split(" ", 1)
            is_sound = checksum == f"{crc32(text.encode()):08x}"
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            is_sound = False
        if not is_sound:
            raise CheckpointError(f"{path}: is damaged")
        return cls._of(json.loads(text))

    @classmethod
    def _of(cls, content: dict[str, Any]) -> "ReadingRecord":
        """What `save` has written, as its checksum has shown."""
        lessons = {
            name: KeptLesson(digest=lesson["digest"], accuracy=dict(lesson["accuracy"]))
            for name, lesson in content["lessons"].items()
        }
        return cls(
            fingerprint=content["fingerprint"],
            ends=content["ends"],
            checksums=content["checksums"],
            lessons=lessons,
        )
