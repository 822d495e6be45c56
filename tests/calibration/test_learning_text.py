"""What of a text a model is expected to say, whatever is learnt from that."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moebatch.calibration.learning_text import LearningText
from moebatch.calibration.texts import read_sequences
from moebatch.checkpoint.model_files import open_model
from moebatch.errors import InputError
from moebatch.rows.prompts import open_reader
from moebatch.spec.job import InputSection, Job, ModelSection, OutputSection
from moebatch.training.whole_model import ANSWER_TOKENS, load_whole
from tests.model.oracle import greedy, load
from tests.tiny import write_checkpoint

Checkpoint = Callable[..., Path]
LONGEST = 80
_WRITTEN = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTION = {"role": "user", "content": "Count to two."}


def text_of(model: Path, path: Path, *, num_tokens: int = 4000) -> LearningText:
    sections = {"input": InputSection(path=path), "output": OutputSection(path=path)}
    job = Job(model=ModelSection(path=model), **sections)
    reader = open_reader(job, vocab_size=320, max_positions=512)
    sequences = read_sequences(path, reader, num_tokens=num_tokens, sequence_tokens=LONGEST)
    return LearningText.of(path, reader, sequences, longest=LONGEST)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_all_of_a_plain_text_is_expected(tmp_path: Path, tiny_checkpoint: Checkpoint) -> None:
    path = tmp_path / "text.txt"
    path.write_text("The river counts the letters.\n" * 60)
    text = text_of(tiny_checkpoint("mixtral"), path)
    assert text.expected == "text" and len(text.unseen) == round(len(text.known) / 9)
    assert {reading.num_given for reading in text.known} == {1}


def test_a_byte_order_mark_is_no_part_of_a_text(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_text("The river counts the letters.\n" * 60)
    marked.write_text(plain.read_text(), encoding="utf-8-sig")
    model = tiny_checkpoint("mixtral")
    assert text_of(model, marked) == text_of(model, plain)


def test_conversations_are_expected_to_end_as_they_do(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    """Rows without an answer and conversations that are too long stand back."""
    rows = [{"messages": [QUESTION, {"role": "assistant", "content": "1 2"}]}] * 20
    rows += [{"messages": [QUESTION, {"role": "assistant", "content": "1 " * LONGEST}]}]
    rows += [{"messages": [QUESTION]}] * 3
    text = text_of(tiny_checkpoint("mixtral"), write_rows(tmp_path / "rows.jsonl", rows))
    assert text.expected == "answers of conversations"
    assert (len(text.known), len(text.unseen)) == (18, 2)
    first = text.known[0]
    assert 3 <= first.num_expected < first.num_given < len(first) <= LONGEST


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages | length }}" + _WRITTEN, "the beginning changes with what follows"),
        ("{{ messages[0].content }}<|assistant|>", "the answer is left out"),
    ],
)
def test_conversations_that_a_template_writes_otherwise_stand_back(
    tmp_path: Path, template: str, why: str
) -> None:
    """What would be learnt as an answer is something else."""
    model = write_checkpoint(tmp_path / "model", "mixtral")
    (model / "chat_template.jinja").write_text(template)
    rows = [{"messages": [QUESTION, {"role": "assistant", "content": "1 2"}]}] * 20
    text = text_of(model, write_rows(tmp_path / "rows.jsonl", rows))
    assert text.expected == "the model's own answers to prompts", why


def test_no_more_conversations_are_learnt_from_than_tokens_are_read(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    rows = [{"messages": [QUESTION, {"role": "assistant", "content": "1 2"}]}] * 200
    path = write_rows(tmp_path / "rows.jsonl", rows)
    few, all_of_it = (
        text_of(tiny_checkpoint("mixtral"), path, num_tokens=tokens) for tokens in (500, 10**5)
    )
    assert len(all_of_it.known) + len(all_of_it.unseen) == 200
    num_tokens = sum(map(len, (*few.known, *few.unseen)))
    assert 500 <= num_tokens < 500 + LONGEST


def test_a_last_token_alone_is_nothing_to_expect(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("The river counts the letters.\n" * 200)
    text = text_of(tiny_checkpoint("mixtral"), path, num_tokens=20 * LONGEST + 1)
    assert {len(reading) for reading in (*text.known, *text.unseen)} == {LONGEST}
    assert (len(text.known), len(text.unseen)) == (18, 2)


def test_prompts_are_expected_to_be_answered_as_the_model_does(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    model = tiny_checkpoint("mixtral")
    rows = [{"prompt": [5 + n, 9, 11, *[20] * (n % 3)]} for n in range(10)]
    text = text_of(model, write_rows(tmp_path / "rows.jsonl", rows))
    assert text.expected == "the model's own answers to prompts"
    files = open_model(model, "float32")
    whole = load_whole(files, dtype=files.dtype, experts="eager")
    (reading,) = text.answered(whole).unseen
    prompt = rows[-1]["prompt"]
    tokens, _ = greedy(load(model), prompt, min(8, ANSWER_TOKENS))
    assert reading.num_given == len(prompt)
    assert reading.tokens[: len(prompt) + 8] == (*prompt, *tokens)


def test_a_text_of_which_nothing_can_be_held_out_is_refused(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": [5, 6, 7]}] * 3)
    with pytest.raises(InputError, match=r"rows.jsonl: has 3 sequences, too few to hold a tenth"):
        text_of(tiny_checkpoint("mixtral"), path)
