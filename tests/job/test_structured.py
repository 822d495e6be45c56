"""Answers that must look like something: JSON by a schema, one of some texts, a pattern."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moebatch.errors import ConfigError
from moebatch.job.job_fields import job_fields
from moebatch.job.notices import describe_sampling
from moebatch.rows.grammars import Matching
from moebatch.rows.refused import RowRefused
from moebatch.rows.tokenizer_files import load_tokenizer
from moebatch.spec.grammar import Grammar
from moebatch.spec.job import load_job
from moebatch.spec.sampling import Sampling
from tests.job.test_resume import answers, run, whole_and_cut, write

Checkpoint = Callable[..., Path]
SCHEMA = {
    "type": "object",
    "properties": {
        "letter": {"enum": ["m", "d", "k"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["letter", "count"],
    "additionalProperties": False,
}
AS_OPENAI = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
ASKED: list[dict[str, Any]] = [
    {"response_format": AS_OPENAI},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"structured_outputs": {"choice": ['say "no"', "Grüße", "two\nlines"]}},
    {"structured_outputs": {"regex": "[a-f]{3}-[0-9]{4}"}},
    {"structured_outputs": {"grammar": 'start: "x" ("," "y")~2..5'}},
    {"response_format": {"type": "text"}},
    {},
]
GREEDY = {"temperature": 0, "max_tokens": 420}
WARM = {"temperature": 1.3, "max_tokens": 420, "n": 2, "logprobs": 1}
PENALISED = {**GREEDY, "min_tokens": 400, "frequency_penalty": 2, "logit_bias": {"96": -100}}


def asked(count: int = 24) -> list[dict[str, object]]:
    return [
        {"custom_id": f"r{i}", "prompt": [3 + (7 * i) % 200] * (2 + i % 9), **ASKED[i % len(ASKED)]}
        for i in range(count)
    ]


def holds(row: dict[str, Any], text: str) -> bool:
    """Whether an answer is what its row has asked for."""
    said = row.get("structured_outputs", {})
    if "choice" in said:
        return text in said["choice"]
    if "regex" in said:
        return re.fullmatch(said["regex"], text) is not None
    if "grammar" in said:
        return re.fullmatch("x(,y){2,5}", text) is not None
    return suits_schema(text)


def suits_schema(text: str) -> bool:
    """Whether it is JSON as `SCHEMA` says."""
    found = json.loads(text)
    letter, count = found["letter"], found["count"]
    whole = type(count) is int and 0 <= count <= 99
    return found.keys() == {"letter", "count"} and letter in ("m", "d", "k") and whole


@pytest.fixture
def model(tiny_checkpoint: Checkpoint) -> Path:
    return tiny_checkpoint("mixtral")


@pytest.mark.parametrize("sampling", [GREEDY, WARM, PENALISED], ids=["greedy", "warm", "penalised"])
def test_every_answer_is_what_its_row_asks_for_and_others_are_what_they_were(
    tmp_path: Path, model: Path, sampling: dict[str, object]
) -> None:
    rows = asked()
    run(write(tmp_path / "held", model, rows, **sampling))
    bare = [{"custom_id": row["custom_id"], "prompt": row["prompt"]} for row in rows]
    run(write(tmp_path / "free", model, bare, **sampling))
    for row, held, free in zip(
        rows, answers(tmp_path / "held"), answers(tmp_path / "free"), strict=True
    ):
        texts = held["text"] if isinstance(held["text"], list) else [held["text"]]
        reasons = held["finish_reason"]
        if "structured_outputs" in row or row.get("response_format") == AS_OPENAI:
            assert set(reasons if isinstance(reasons, list) else [reasons]) == {"stop"}
            assert all(holds(row, text) for text in texts), (row, texts)
            assert held["text"] != free["text"]
            assert held["usage"]["completion_tokens"] <= sum(
                len(text.encode()) + 1 for text in texts
            )
        else:
            assert held["text"] == free["text"]


def test_a_stopped_job_goes_on_where_its_answers_were(tmp_path: Path, model: Path) -> None:
    whole, cut = whole_and_cut(tmp_path, model, asked(), 70, **WARM)
    assert [each["text"] for each in cut] == [each["text"] for each in whole]


def test_the_job_may_ask_for_all_rows_and_rows_for_something_else(
    tmp_path: Path, model: Path
) -> None:
    rows: list[dict[str, object]] = [
        {"custom_id": "job", "prompt": [9, 9]},
        {"custom_id": "own", "prompt": [9, 9], "structured_outputs": {"choice": ["b"]}},
    ]
    run(write(tmp_path, model, rows, **GREEDY, structured_outputs={"choice": ["a"]}))
    assert [each["text"] for each in answers(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"response_format": {"type": "json"}},
            "response_format has a type that must be one of text, json_object, json_schema, got 'j",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "objekt"}},
                }
            },
            "response_format cannot be compiled: Invalid type: objekt",
        ),
        (
            {"structured_outputs": {"json": {"type": "string", "pattern": "("}}},
            "structured_outputs cannot be compiled: ",
        ),
        (
            {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}},
            'structured_outputs cannot be compiled: Unimplemented keys: ["uniqueItems"]',
        ),
        (
            {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}},
            "structured_outputs says what response_format says as well; give one of them",
        ),
    ],
)
def test_what_cannot_be_held_to_is_an_error_of_the_row_alone(
    tmp_path: Path, model: Path, asked: dict[str, object], message: str
) -> None:
    good: dict[str, object] = {"custom_id": "good", "prompt": [9, 9]}
    run(write(tmp_path, model, [{"custom_id": "bad", "prompt": [9], **asked}, good], **GREEDY))
    bad, other = answers(tmp_path)
    assert bad["error"]["code"] == "invalid_value"
    assert bad["error"]["message"].startswith(message)
    assert other["error"] is None


def test_what_the_job_asks_for_and_cannot_be_held_to_is_an_error_of_the_job(
    tmp_path: Path, model: Path
) -> None:
    rows: list[dict[str, object]] = [{"custom_id": "a", "prompt": [9, 9]}]
    with pytest.raises(ConfigError, match=r"sampling.structured_outputs.*cannot be compiled"):
        run(write(tmp_path, model, rows, **GREEDY, structured_outputs={"regex": "("}))


def test_an_answer_that_gets_beyond_what_a_grammar_may_take_fails_alone(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = property(lambda self: "too complex" if self._matcher.is_accepting() else "")
    monkeypatch.setattr(Matching, "fault", fault)
    free: dict[str, object] = {"custom_id": "free", "prompt": [9, 9]}
    held = {**free, "custom_id": "held", **ASKED[3]}
    run(write(tmp_path, model, [held, free], **GREEDY))
    failed, other = answers(tmp_path)
    assert failed["error"]["code"] == "grammar_failed"
    assert "cannot be held to its grammar any more: too complex" in failed["error"]["message"]
    assert other["error"] is None


def test_a_model_whose_answers_have_no_end_is_not_held_to_anything(
    tmp_path: Path, model: Path
) -> None:
    grammars = load_tokenizer(model, vocab_size=320).grammars(
        vocab_size=320, end_tokens=frozenset()
    )
    with pytest.raises(RowRefused, match="response_format needs an end token"):
        grammars.require(Sampling(response_format=Grammar("regex", "a")))


def with_template(folder: Path, model: Path, template: str, **renamed: str) -> Path:
    """The model with another chat template, and other names of special tokens."""
    shutil.copytree(model, folder)
    file = folder / "tokenizer.json"
    text = file.read_text()
    for name, other in renamed.items():
        assert f"<|{name}|>" in text
        text = text.replace(f"<|{name}|>", other)
    file.write_text(text)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def with_thoughts(folder: Path, model: Path, prompt: str) -> Path:
    """The model with markers of thought for two of its tokens, and a template that ends so."""
    template = "{{ messages[0].content }}" + prompt
    return with_template(folder, model, template, system="<think>", user="</think>")


@pytest.mark.parametrize(
    ("prompt", "wanted", "thinks", "says"),
    [
        ("<think>\n", "</think>", True, True),
        ("<think>\n", "a", True, False),
        ("", "<think>", True, False),
        ("", "a", False, True),
    ],
)
def test_a_thought_is_free_and_the_answer_behind_it_is_held_to_the_grammar(
    tmp_path: Path, model: Path, prompt: str, wanted: str, thinks: bool, says: bool
) -> None:
    model = with_thoughts(tmp_path / "model", model, prompt)
    token = load_tokenizer(model, vocab_size=320).encode(wanted)[-1]
    row = {"custom_id": "a", "messages": [{"role": "user", "content": "2 + 2"}], **ASKED[3]}
    rows: list[dict[str, object]] = [{**row, "logit_bias": {str(token): 100}}]
    status = run(write(tmp_path / "job", model, rows, temperature=0, max_tokens=20)).status()
    assert (status.num_cut_off, status.num_cut_thinking) == (not says, thinks and not says)
    (answer,) = answers(tmp_path / "job")
    assert bool(answer["usage"]["completion_tokens_details"]["reasoning_tokens"]) == thinks
    assert holds(ASKED[3], answer["text"]) == says
    assert answer["finish_reason"] == ("stop" if says else "length")


def test_a_thought_that_stays_in_the_text_is_free_as_well(tmp_path: Path, model: Path) -> None:
    model = with_thoughts(tmp_path / "model", model, "<think>")
    token = load_tokenizer(model, vocab_size=320).encode("</think>")[-1]
    row = {"custom_id": "a", "messages": [{"role": "user", "content": "2 + 2"}], **ASKED[3]}
    rows: list[dict[str, object]] = [{**row, "logit_bias": {str(token): 100}}]
    job = write(tmp_path / "job", model, rows, temperature=0, max_tokens=20)
    content = json.loads(job.read_text())
    content["output"]["reasoning"] = "in-text"
    job.write_text(json.dumps(content))
    status = run(job).status()
    (answer,) = answers(tmp_path / "job")
    assert "reasoning_content" not in answer
    assert holds(ASKED[3], answer["text"].removeprefix("</think>"))
    assert status.num_cut_thinking == 0


def test_plans_know_how_long_one_of_some_texts_may_be(tmp_path: Path, model: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "custom_id": str(i),
            "prompt": [9] * (i + 1),
            "structured_outputs": {"choice": ["a", "äb"]},
        }
        for i in range(4)
    ]
    attempt = run(write(tmp_path, model, rows, temperature=1, max_tokens=300))._attempt
    assert attempt is not None and attempt.plan is not None
    assert attempt.plan.problem.workload.mean_new_tokens == 4
    assert {each["finish_reason"] for each in answers(tmp_path)} == {"stop"}


def test_plans_count_what_grammars_take_of_memory(tmp_path: Path, model: Path) -> None:
    """So many answers as are held to one, and what tokens are sorted into."""

    def planned(name: str, rows: list[dict[str, object]]) -> dict[str, float]:
        attempt = run(write(tmp_path / name, model, rows, **GREEDY))._attempt
        assert attempt is not None and attempt.plan is not None
        plan = attempt.plan
        assert plan.policy.batch_size == len(rows)
        buffers = plan.problem.memory.buffers(plan.policy)
        return {each.name: each.num_bytes for each in buffers if "grammars" in each.name}

    bare: list[dict[str, object]] = [
        {"custom_id": str(i), "prompt": [9] * (i + 1)} for i in range(16)
    ]
    assert planned("free", bare) == {}
    quarter = planned(
        "quarter", [{**row, **(ASKED[1] if i < 4 else {})} for i, row in enumerate(bare)]
    )
    half = planned("half", [{**row, **(ASKED[1] if i < 8 else {})} for i, row in enumerate(bare)])
    assert quarter.keys() == half.keys() == {"tokens of grammars", "answers by grammars"}
    assert half["answers by grammars"] == 2 * quarter["answers by grammars"]
    assert quarter["tokens of grammars"] == half["tokens of grammars"] > 100e6


def test_what_answers_are_held_to_is_said_in_a_line() -> None:
    choice = Sampling(structured_outputs=Grammar("choice", '["a", "b"]'))
    assert describe_sampling(choice).endswith(', structured_outputs choice ["a", "b"]')
    schema = Sampling(response_format=Grammar("schema", json.dumps({"enum": ["x" * 4000]})))
    assert len(describe_sampling(schema)) < 200


def test_jobs_with_other_schemas_are_other_jobs(tmp_path: Path) -> None:
    """However long what they have in common is."""
    long = {"type": "string", "description": "x" * 4000}
    schemas: list[dict[str, object]] = [{**long, "maxLength": 1}, {**long, "maxLength": 2}]
    fields = [
        job_fields(load_job(write(tmp_path, tmp_path, [], structured_outputs={"json": schema})))
        for schema in schemas
    ]
    names = {name for name in fields[0] if fields[0][name] != fields[1][name]}
    assert names == {"sampling.structured_outputs"}
