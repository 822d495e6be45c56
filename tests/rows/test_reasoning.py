"""What models think before they answer, kept apart from their answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from moebatch.folder.claim import Manifest
from moebatch.job.job_fields import job_fields, supposed_manifest
from moebatch.rows.dialects import Served, result_line
from moebatch.rows.prompts import open_reader
from moebatch.rows.row import RawRow, ReadyRow, Row
from moebatch.rows.tokenizer import Tokenizer
from moebatch.rows.tokenizer_files import load_tokenizer
from moebatch.spec.job import Job
from moebatch.spec.request import Choice, FinishReason, Outcome, Request
from moebatch.spec.sampling import Sampling
from tests.tiny import write_tokenizer

THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
END = "<|done|>"
ROW = Row(index=0, line=1, custom_id="a", dialect="openai", kind="chat")


def with_markers(folder: Path, *markers: str, special: bool) -> Tokenizer:
    write_tokenizer(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(markers), special_tokens=special)
    tokenizer.add_tokens([END], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder, vocab_size=512)


def answered(
    tokenizer: Tokenizer,
    prompt: str,
    answer: str,
    *,
    ended: FinishReason = "stop",
    stop: str | None = None,
    row: Row = ROW,
) -> Any:
    """The body of what is written where a model goes on from a prompt like that."""
    tokens = plain(tokenizer, answer)
    by_token = ended == "stop" and stop is None
    text = tokenizer.decode(tokens)
    choice = Choice(
        index=0,
        tokens=(*tokens, *plain(tokenizer, END)) if by_token else tokens,
        text=text if stop is None else text[: text.index(stop)],
        finish_reason=ended,
        stop_reason=stop,
    )
    request = Request(
        index=0,
        custom_id="a",
        prompt_tokens=plain(tokenizer, prompt),
        sampling=Sampling(),
        reasoning=tokenizer.reasoning,
    )
    served = Served(model="m", token_bytes=tokenizer.token_bytes, decode=tokenizer.decode)
    line = json.loads(result_line(row, Outcome(request=request, choices=(choice,)), served))
    return line["response"]["body"] if row is ROW else line["response"]


def plain(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    first = tokenizer.encode("")
    tokens = tokenizer.encode(text)
    assert tokens[: len(first)] == first
    return tokens[len(first) :]


def message(body: Any) -> tuple[Any, Any]:
    found = body["choices"][0]["message"]
    return found["reasoning_content"], found["content"]


@pytest.fixture(params=[True, False], ids=["special", "plain"])
def thinker(tmp_path: Path, request: pytest.FixtureRequest) -> Tokenizer:
    return with_markers(tmp_path, *THINK, special=request.param)


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("Say:", "<think>\nso so\n</think>\n\n 4 < 5\n", ("so so", " 4 < 5\n")),
        ("Say:<think>\n", "so so</think>4", ("so so", "4")),
        ("Say:<think>", "so</think>4</think>5", ("so", "4</think>5")),
        ("Say:", "\n<think>so</think>4", ("so", "4")),
        ("Say:<think>\n\n</think>\n\n", "4", (None, "4")),
        ("Say:", "4 </think> 5", (None, "4 </think> 5")),
        ("What does <think> mean? Say:", "it opens", (None, "it opens")),
        ("Say:<think>\n", "</think>\n\n4", (None, "4")),
    ],
)
def test_what_is_thought_is_no_part_of_the_answer(
    thinker: Tokenizer, prompt: str, answer: str, expected: tuple[str | None, str]
) -> None:
    thought, said = expected
    if not thinker.decode(plain(thinker, THINK[1])):  # special tokens have no text
        said = said.replace(THINK[1], "")
    assert message(answered(thinker, prompt, answer)) == (thought, said)


def test_a_thought_that_was_cut_off_has_no_answer(thinker: Tokenizer) -> None:
    body = answered(thinker, "Say:<think>\n", "so so", ended="length")
    assert message(body) == ("so so", "")
    details = body["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": body["usage"]["completion_tokens"]}


def test_tokens_of_thought_are_counted_with_their_markers(thinker: Tokenizer) -> None:
    usage = answered(thinker, "Say:", "<think>so</think>4")["usage"]
    num_thought = len(plain(thinker, "<think>so</think>"))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_thought}
    assert usage["completion_tokens"] > num_thought
    usage = answered(thinker, "Say:", "4")["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<think>so</think>one STOP", ("so", "one ")),
        ("<think>so STOP", ("so ", "")),
    ],
)
def test_a_stop_text_cuts_off_the_end(
    thinker: Tokenizer, answer: str, expected: tuple[str, str]
) -> None:
    assert message(answered(thinker, "Say:", answer, stop="STOP")) == expected


def test_a_plain_row_has_both(thinker: Tokenizer) -> None:
    row = Row(index=0, line=1, custom_id="a", dialect="plain", columns=b'{"prompt":"x"}')
    response = answered(thinker, "Say:", "<think>so</think>4", row=row)
    assert (response["reasoning_content"], response["text"]) == ("so", "4")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>4",
            ("so", "4"),
        ),
        ("<|channel|>final<|message|>4", (None, "4")),
        ("<|channel|>final json<|message|>4", (None, "4")),
        (
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary"
            "<|message|> so<|end|><|start|>assistant<|channel|>final<|message|>4",
            ("so so", "4"),
        ),
        ("<|channel|>analysis<|message|>a final", ("a final", "")),
    ],
)
def test_all_channels_but_the_last_are_thought(
    tmp_path: Path, answer: str, expected: tuple[str | None, str]
) -> None:
    tokenizer = with_markers(tmp_path, *HARMONY, special=True)
    assert message(answered(tokenizer, "Say:<|end|><|start|>assistant", answer)) == expected


def test_the_label_of_a_thought_says_nothing(tmp_path: Path) -> None:
    tokenizer = with_markers(tmp_path, "<|channel>", "<channel|>", special=True)
    assert message(answered(tokenizer, "Say:", "<|channel>thought\nso\n<channel|>4")) == ("so", "4")
    assert message(answered(tokenizer, "Say:", "<|channel>thought\n<channel|>4")) == (None, "4")


@pytest.mark.parametrize("markers", [[], ["<think>"], ["</think>"], ["<|channel|>"]])
def test_without_markers_all_is_the_answer(tmp_path: Path, markers: Sequence[str]) -> None:
    tokenizer = with_markers(tmp_path, *markers, special=False)
    assert tokenizer.reasoning is None
    body = answered(tokenizer, "Say:", "<think>so</think>4")
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "<think>so</think>4",
        "refusal": None,
    }
    assert "completion_tokens_details" not in body["usage"]


MESSAGES = {"messages": [{"role": "user", "content": "2 + 2"}]}


@pytest.mark.parametrize(("row", "is_split"), [(MESSAGES, True), ({"prompt": "2 + 2"}, False)])
def test_only_answers_to_messages_are_split(
    tmp_path: Path, row: dict[str, Any], is_split: bool
) -> None:
    tokenizer = with_markers(tmp_path, *THINK, special=False)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "eos_token_id": 2}')
    paths = {"model": {"path": str(tmp_path)}, "input": {"path": "i"}, "output": {"path": "o"}}
    reader = open_reader(Job.model_validate(paths), vocab_size=512, max_positions=64)
    ready = reader.request(RawRow(index=0, line=1, content=json.dumps(row).encode()))
    assert isinstance(ready, ReadyRow)
    assert ready.request.reasoning == (tokenizer.reasoning if is_split else None)


def test_a_job_that_splits_otherwise_is_another_job(tmp_path: Path) -> None:
    def job(**output: str) -> Job:
        paths = {"model": {"path": str(tmp_path)}, "input": {"path": "i"}}
        return Job.model_validate({**paths, "output": {"path": "o", **output}})

    before = Manifest(fields=job_fields(job()))
    assert supposed_manifest(job(reasoning="separate"), before) == before
    after = supposed_manifest(job(reasoning="in-text"), before)
    assert after != before
    assert supposed_manifest(job(), after) == before


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("around", ["RESPONSE", "TEXT"])
def test_cohere_marks_thoughts_and_answers(tmp_path: Path, around: str, special: bool) -> None:
    opens, closes = f"<|START_{around}|>", f"<|END_{around}|>"
    marks = ("<|START_THINKING|>", "<|END_THINKING|>", opens, closes)
    tokenizer = with_markers(tmp_path, *marks, special=special)
    answer = f"so so<|END_THINKING|>{opens}4 < 5{closes}"
    assert message(answered(tokenizer, "Say:<|START_THINKING|>", answer)) == ("so so", "4 < 5")
