"""Marks the answers of a demo job.

The right answers are stored nowhere: they are worked out from the prompts, so any subset of the
rows in any order can be marked.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from demo.tasks import mark, solve
from moebatch.errors import Fault, InputError

PASS_SHARE: Final = 0.95
Text = TypeVar("Text", str, str | None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What became of the rows of a job, by kind of task."""

    right: Mapping[str, int]
    total: Mapping[str, int]
    """Rows asked; a row without an answer counts as wrong."""
    num_unanswered: int
    num_unasked: int
    """Answers to rows that are not in the job; they count for nothing."""

    @property
    def share(self) -> float:
        """Right answers of all rows asked, 0..1; 0 where nothing was asked."""
        return sum(self.right.values()) / max(1, sum(self.total.values()))

    @property
    def passed(self) -> bool:
        """Whether the share is what the demo requires of a working runner."""
        return self.share >= PASS_SHARE


def mark_files(job: Path, answers: Path) -> Mark:
    """Marks the output file of a batch against its input file.

    Raises InputError for a line that is no JSON object or lacks what every row has, and
    UnknownTask for a row that asks no task of the demo.
    """
    questions = dict(_read(job, _question))
    return mark_answers(questions, dict(_read(answers, _answer)))


def mark_answers(questions: Mapping[str, str], answers: Mapping[str, str | None]) -> Mark:
    """Marks answers against prompts, both by custom_id; None stands for a failed request."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    num_unanswered = 0
    for custom_id, prompt in questions.items():
        task = solve(prompt)
        answer = answers.get(custom_id)
        num_unanswered += answer is None
        total[task.kind] += 1
        right[task.kind] += answer is not None and mark(task.answer, answer)
    return Mark(
        right=right,
        total=total,
        num_unanswered=num_unanswered,
        num_unasked=len(answers.keys() - questions.keys()),
    )


def _question(row: dict[str, Any]) -> str:
    return str(row["body"]["messages"][-1]["content"])


def _answer(row: dict[str, Any]) -> str | None:
    """Text of an output line, None where the request failed."""
    if row["error"] or row["response"]["status_code"] != 200:
        return None
    return str(row["response"]["body"]["choices"][0]["message"]["content"])


def _read(path: Path, text_of: Callable[[dict[str, Any]], Text]) -> Iterator[tuple[str, Text]]:
    """custom_id and text of each line."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield str(row["custom_id"]), text_of(row)
        except (ValueError, LookupError, TypeError) as error:
            message = f"not a row of a batch: {error!r}"
            raise InputError([Fault(file=str(path), line=number, message=message)]) from error
