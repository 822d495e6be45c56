"""A kind of task: how its questions are phrased, drawn and solved."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked, without the phrasing around it, and the right answer."""

    subject: str
    answer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of task. `draw` and `solve` reach the answer on different ways, so that a test
    can set one against the other: `draw` knows it from what it builds the subject of, `solve`
    reads it out of the finished text."""

    name: str
    phrasings: tuple[str, ...]
    """Prompts with one `{}` for the subject; what stands before it is unique to the kind."""
    draw: Callable[[Random], Question]
    solve: Callable[[str], str]

    def subject_of(self, prompt: str) -> str | None:
        """The subject of a prompt of this kind, None for a prompt of another kind."""
        for phrasing in self.phrasings:
            before, after = phrasing.split("{}")
            if prompt.startswith(before) and prompt.endswith(after):
                return prompt[len(before) : len(prompt) - len(after)]
        return None
