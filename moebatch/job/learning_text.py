"""A text as a model learns from it: all of a plain text, the last answers of conversations."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from moebatch.job.texts import TokenSequence, is_plain_text
from moebatch.rows.prompts import RowReader
from moebatch.rows.refused import RowRefused
from moebatch.rows.row import Chat, FailedRow
from moebatch.rows.source import open_source
from moebatch.training.recipe import Sample


def samples_of(
    path: Path, reader: RowReader, sequences: Sequence[TokenSequence], *, longest: int
) -> list[Sample]:
    """Conversations of a job's input that end with an answer, of which that is learnt; of a text
    without any, `sequences`, of which everything is. Conversations of more than `longest` tokens,
    and all beyond as many tokens as `sequences` have, are left out."""
    left, found = sum(map(len, sequences)), []
    for sample in () if is_plain_text(path) else _answered(path, reader):
        if len(sample) <= longest:
            found.append(sample)
            left -= len(sample)
        if left <= 0:
            break
    return found or [Sample(tokens) for tokens in sequences if len(tokens) > 1]


def _answered(path: Path, reader: RowReader) -> Iterator[Sample]:
    for raw in open_source(path):
        parsed = reader.parse(raw)
        if isinstance(parsed, FailedRow) or not isinstance(parsed.prompt, Chat):
            continue
        if parsed.prompt.messages[-1].get("role") == "assistant":
            sample = _sample(parsed.prompt, reader)
            if sample is not None:
                yield sample


def _sample(chat: Chat, reader: RowReader) -> Sample | None:
    """None where the template does not write a conversation as it writes its beginning."""
    asked = replace(chat, messages=chat.messages[:-1], add_generation_prompt=True)
    answered = replace(chat, add_generation_prompt=False, continue_final_message=False)
    try:
        before = reader.tokenizer.encode_chat(asked, reader.template_variables)
        tokens = reader.tokenizer.encode_chat(answered, reader.template_variables)
    except RowRefused:
        return None
    fits = len(before) < len(tokens) <= reader.max_positions and tokens[: len(before)] == before
    return Sample(tokens, max(1, len(before))) if fits else None
