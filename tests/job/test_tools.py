"""Jobs whose rows offer tools to the model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moebatch.errors import ConfigError
from moebatch.folder.claim import Manifest
from moebatch.job.check import check_job
from moebatch.job.job_fields import job_fields, supposed_manifest
from moebatch.rows.tokenizer_files import load_tokenizer
from moebatch.spec.job import Job, load_job
from tests.job.test_resume import answers, run, whole_and_cut, write
from tests.job.test_structured import SCHEMA, suits_schema, with_template

Checkpoint = Callable[..., Path]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>arguments{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
HARMONY = "{{ tools }}{{ messages[0].content }}{# <|channel|>commentary functions. <|call|> #}"
COUNT = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
BY_NAME = {"type": "function", "function": {"name": "count"}}
WARM = {"temperature": 1.3, "max_tokens": 300, "n": 2}


def asked(count: int) -> list[dict[str, object]]:
    choices: list[dict[str, object]] = [
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": BY_NAME},
        {"tool_choice": "none"},
        {},
    ]
    return [
        {
            "custom_id": f"r{place}",
            "messages": [{"role": "user", "content": "a" * (1 + place % 5)}],
            **choices[place % len(choices)],
        }
        for place in range(count)
    ]


def holds(call: dict[str, Any]) -> bool:
    function = call["function"]
    if function["name"] == "now":
        return json.loads(function["arguments"]) == {}
    return suits_schema(function["arguments"])


@pytest.fixture
def model(tmp_path: Path, tiny_checkpoint: Checkpoint) -> Path:
    return with_template(tmp_path / "model", tiny_checkpoint("mixtral"), TEMPLATE)


def test_a_stopped_job_goes_on_with_the_same_tools(tmp_path: Path, model: Path) -> None:
    offered = {"tools": [COUNT, NOW]}
    whole, found = whole_and_cut(tmp_path, model, asked(16), 150, **WARM, **offered)
    assert found == whole
    for row, answer in zip(asked(16), found, strict=True):
        if row.get("tool_choice") not in ("required", BY_NAME):
            assert set(answer["finish_reason"]) <= {"stop", "length"}
            continue
        assert answer["finish_reason"] == ["tool_calls"] * 2
        assert answer["text"] == [None, None]
        calls = [call for choice in answer["tool_calls"] for call in choice]
        assert len(calls) == 2
        assert all(map(holds, calls)), calls
        if row["tool_choice"] == BY_NAME:
            assert {call["function"]["name"] for call in calls} == {"count"}


def test_a_token_that_ends_a_call_ends_answers_of_rows_with_tools_alone(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    model = with_template(
        tmp_path / "model", tiny_checkpoint("mixtral"), HARMONY, system="<|call|>"
    )
    (end,) = load_tokenizer(model, vocab_size=320).encode("<|call|>")[-1:]
    row = {"messages": [{"role": "user", "content": "a"}], "logit_bias": {str(end): 100}}
    rows: list[dict[str, object]] = [row, {**row, "tools": [NOW]}]
    run(write(tmp_path / "job", model, rows, temperature=0, max_tokens=5))
    free, offered = answers(tmp_path / "job")
    assert (free["finish_reason"], free["usage"]["completion_tokens"]) == ("length", 5)
    assert (offered["finish_reason"], offered["usage"]["completion_tokens"]) == ("stop", 1)
    assert offered["stop_reason"] == end


def test_check_says_what_is_wrong_with_tools(tmp_path: Path, model: Path) -> None:
    messages = [{"role": "user", "content": "a"}]
    rows: list[dict[str, object]] = [
        {"messages": messages, "tools": [NOW]},
        {"messages": messages, "tools": [{"type": "function", "function": {}}]},
        {"prompt": "a", "tools": [NOW]},
    ]
    found = check_job(write(tmp_path / "job", model, rows, max_tokens=5))
    messages_of_faults = [fault.message for fault in found.faults]
    assert len(messages_of_faults) == 2
    assert messages_of_faults[0].startswith("tools[0].function.name must be a text")
    assert messages_of_faults[1].startswith("tools are for messages")


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"tools": [{"type": "f"}]}, "sampling.tools: [0].type must be function"),
        ({"tool_choice": "any"}, "sampling.tool_choice: must be one of none, auto, required"),
        (
            {"tools": [NOW], "tool_choice": BY_NAME},
            "sampling.tool_choice: names a function that must be one of now, got 'count'",
        ),
        (
            {"tools": [NOW], "response_format": {"type": "json_object"}},
            "sampling.tools: may be called, but response_format leaves no room",
        ),
    ],
)
def test_what_a_job_says_of_tools_is_checked(
    tmp_path: Path, model: Path, sampling: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(write(tmp_path / "job", model, [], **sampling))
    assert message in str(caught.value)


def test_a_job_may_say_that_tools_which_rows_bring_must_be_called(
    tmp_path: Path, model: Path
) -> None:
    messages = [{"role": "user", "content": "a"}]
    rows: list[dict[str, object]] = [{"messages": messages, "tools": [COUNT]}, {"prompt": "a"}]
    run(write(tmp_path / "job", model, rows, tool_choice="required", max_tokens=300, temperature=0))
    called, bare = answers(tmp_path / "job")
    assert called["error"] is None
    assert bare["error"]["message"] == "tool_choice is required, but there are no tools"


def test_a_job_with_other_tools_is_another_job(tmp_path: Path) -> None:
    def job(output: dict[str, str] | None = None, **sampling: object) -> Job:
        paths = {"model": {"path": str(tmp_path)}, "input": {"path": "i"}}
        rest = {"output": {"path": "o", **(output or {})}, "sampling": sampling}
        return Job.model_validate({**paths, **rest})

    before = Manifest(fields=job_fields(job()))
    others = [
        job(tools=[NOW]),
        job(tools=[COUNT]),
        job(tool_choice="none"),
        job(parallel_tool_calls=False),
        job(output={"tool_calls": "in-text"}),
    ]
    manifests = [supposed_manifest(each, before) for each in others]
    assert all(each != before for each in manifests)
    assert len({json.dumps(each.fields, sort_keys=True) for each in manifests}) == len(manifests)
    assert supposed_manifest(job(), manifests[0]) == before
