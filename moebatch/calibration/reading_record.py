"""How far a calibration has come: one small file that says what beside it can be believed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moebatch.spec.policy import PredictorName


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

    @property
    def content(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "fingerprint": self.fingerprint,
            "ends": self.ends,
            "checksums": self.checksums,
            "lessons": {
                name: {"digest": lesson.digest, "accuracy": list(lesson.accuracy.items())}
                for name, lesson in self.lessons.items()
            },
        }

    @classmethod
    def of(cls, content: dict[str, Any]) -> "ReadingRecord":
        """The one of that `content`."""
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
