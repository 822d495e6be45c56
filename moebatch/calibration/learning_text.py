"""A text as a model learns from it and is examined by it: what it should say of
it, and what it need not.

A plain text is expected word for word, of conversations the answers with which they end. Prompts
without an answer are nothing that a model was made to say: what counts is what the exact model
itself answers to them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from moebatch.calibration.texts import HELD_OUT_SHARE, TokenSequence, is_plain_text
from moebatch.errors import InputError
from moebatch.rows.prompts import RowReader
from moebatch.rows.refused import RowRefused
from moebatch.rows.row import Chat, FailedRow
from moebatch.rows.source import open_source
from moebatch.training.reading import Reading, num_expected
from moebatch.training.whole_model import WholeModel

Expected = Literal["text", "answers of conversations", "the model's own answers to prompts"]
"""What counts, as people call it."""
MOST_EXAMINED_TOKENS = 8192
"""Of what is held out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningText:
    """What is learnt from, and what that is examined by."""

    known: Sequence[Reading]
    unseen: Sequence[Reading]
    """Held out."""
    expected: Expected

    @classmethod
    def of(
        cls, path: Path, reader: RowReader, sequences: Sequence[TokenSequence], *, longest: int
    ) -> "LearningText":
        """Conversations of a job's input that end with an answer; of an input without any, or of a
        plain text, `sequences`, as which it was read. Conversations of more than `longest` tokens,
        and all beyond as many tokens as `sequences` have, are left out, and so are sequences in
        which nothing is expected. The last tenth is held out.

        Raises InputError where that is nothing.
        """
        is_plain = is_plain_text(path)
        expected: Expected = "text" if is_plain else "the model's own answers to prompts"
        least_tokens = 2 if is_plain else 1
        readings = [Reading(tokens) for tokens in sequences if len(tokens) >= least_tokens]
        if not is_plain:
            most_tokens = sum(map(len, sequences))
            found = list(_conversations(path, reader, longest=longest, most_tokens=most_tokens))
            if found:
                expected, readings = "answers of conversations", found
        num_unseen = round(len(readings) * HELD_OUT_SHARE)
        if not num_unseen:
            message = f"has {len(readings)} sequences, too few to hold a tenth out; give 10"
            raise InputError.at(path, message)
        return cls(
            known=readings[:-num_unseen],
            unseen=evenly(readings[-num_unseen:], MOST_EXAMINED_TOKENS),
            expected=expected,
        )

    @property
    def num_examined(self) -> int:
        """Tokens that count among those that are held out; prompts have none until they are
        answered."""
        return num_expected(self.unseen)

    def answered(self, model: WholeModel) -> "LearningText":
        """With what the model, as it is now, answers to prompts; others stay what they are."""
        if self.expected != "the model's own answers to prompts":
            return self
        known, unseen = model.answered(self.known), model.answered(self.unseen)
        return replace(self, known=known, unseen=unseen)


def evenly(readings: Sequence[Reading], most_tokens: int) -> Sequence[Reading]:
    """About so many tokens of them, from all over."""
    return readings[:: -(-sum(map(len, readings)) // most_tokens)]


def _conversations(
    path: Path, reader: RowReader, *, longest: int, most_tokens: int
) -> Iterator[Reading]:
    left = most_tokens
    for raw in open_source(path):
        parsed = reader.parse(raw)
        if isinstance(parsed, FailedRow) or not isinstance(parsed.prompt, Chat):
            continue
        reading = _reading(parsed.prompt, reader)
        if reading is not None and len(reading) <= longest:
            yield reading
            left -= len(reading)
            if left <= 0:
                return


def _reading(chat: Chat, reader: RowReader) -> Reading | None:
    """None where a conversation does not end with an answer, or the template does not write it as
    it writes its beginning."""
    if chat.messages[-1].get("role") != "assistant":
        return None
    asked = replace(chat, messages=chat.messages[:-1], add_generation_prompt=True)
    ended = replace(chat, add_generation_prompt=False, continue_final_message=False)
    try:
        before = reader.tokenizer.encode_chat(asked, reader.template_variables)
        tokens = reader.tokenizer.encode_chat(ended, reader.template_variables)
    except RowRefused:
        return None
    fits = len(before) < len(tokens) <= reader.max_positions and tokens[: len(before)] == before
    return Reading(tokens, max(1, len(before))) if fits else None
