"""Result lines: both dialects, both forms of log-probabilities, and errors."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moebatch.rows.dialects import Served, result_line
from moebatch.rows.row import Row
from moebatch.spec.request import Choice, Outcome, Request, RowError, TokenLogprob
from moebatch.spec.sampling import Sampling

TOKENS = {1: b"Hi", 2: b" \xe2\x98", 3: b"\x83!", 4: b"</s>"}


def decode(tokens: Sequence[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token != 4).decode("utf-8", "replace")


SERVED = Served(
    model="served",
    token_bytes=TOKENS.__getitem__,
    decode=decode,
    fingerprint="fp",
    created=7,
)
CHAT = Row(index=3, line=4, custom_id="a", dialect="openai", kind="chat", model="asked")
PLAIN = Row(
    index=3,
    line=4,
    custom_id="a",
    dialect="plain",
    kind="completion",
    columns=b'{"id":"a","prompt":"x","score":0.1}',
)
REFUSED = RowError(status=400, code="invalid_value", message="n must be 1", param="n")


def outcome(*choices: Choice, **sampling: Any) -> Outcome:
    request = Request(index=3, custom_id="a", prompt_tokens=(1, 2), sampling=Sampling(**sampling))
    return Outcome(request=request, choices=choices)


def choice(text: str = "Hi", **fields: Any) -> Choice:
    return Choice(**{"index": 0, "tokens": (1, 4), "text": text, "finish_reason": "stop"} | fields)


def strict(line: bytes) -> Any:
    assert b"\n" not in line
    assert line.decode("utf-8"), "or it raises"

    def never(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(line, parse_constant=never)


def written(row: Row, result: Outcome | RowError, **served: Any) -> Any:
    fields = {name: getattr(SERVED, name) for name in SERVED.__slots__}
    return strict(result_line(row, result, Served(**fields | served)))


def test_chat_completion() -> None:
    line = written(CHAT, outcome(choice("Grüße \u2028")))
    body = line["response"].pop("body")
    name = line["id"].removeprefix("batch_req_")
    assert len(name) == 24
    assert line == {
        "id": f"batch_req_{name}",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": f"req_{name}"},
        "error": None,
    }
    assert body == {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": 7,
        "model": "asked",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Grüße \u2028", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
        "system_fingerprint": "fp",
    }


def test_text_completion() -> None:
    row = Row(index=3, custom_id="a", dialect="openai", kind="completion")
    found = outcome(choice(finish_reason="length", stop_reason="x"), choice("Ho", index=1), n=2)
    body = written(row, found)["response"]["body"]
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "served")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hi",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": "x",
        },
        {
            "index": 1,
            "text": "Ho",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        },
    ]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}


LOGPROBS = (
    TokenLogprob(token=2, logprob=-0.5, top={2: -0.5, 1: -math.inf}),
    TokenLogprob(token=3, logprob=-1.0, top={}),
    TokenLogprob(token=1, logprob=-2.0, top={}),
)


def test_logprobs_of_chats() -> None:
    found = outcome(choice(logprobs=LOGPROBS), logprobs=2)
    logprobs = written(CHAT, found)["response"]["body"]["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert logprobs["content"][0] == {
        "token": " \ufffd",
        "logprob": -0.5,
        "bytes": [0x20, 0xE2, 0x98],
        "top_logprobs": [
            {"token": " \ufffd", "logprob": -0.5, "bytes": [0x20, 0xE2, 0x98]},
            {"token": "Hi", "logprob": -9999.0, "bytes": [72, 105]},
        ],
    }


def test_logprobs_of_completions() -> None:
    row = Row(index=3, custom_id="a", dialect="openai", kind="completion")
    found = outcome(choice(logprobs=LOGPROBS), logprobs=2)
    assert written(row, found)["response"]["body"]["choices"][0]["logprobs"] == {
        "tokens": ["bytes:\\x20\\xe2\\x98", "bytes:\\x83\\x21", "Hi"],
        "token_logprobs": [-0.5, -1.0, -2.0],
        "top_logprobs": [{"bytes:\\x20\\xe2\\x98": -0.5, "Hi": -9999.0}, {}, {}],
        "text_offset": [0, 1, 3],
    }


def offsets(*tokens: int, **served: Any) -> Any:
    row = Row(index=3, custom_id="a", dialect="openai", kind="completion")
    logprobs = tuple(TokenLogprob(token=token, logprob=-1.0, top={}) for token in tokens)
    found = outcome(choice(logprobs=logprobs), logprobs=0)
    return written(row, found, **served)["response"]["body"]["choices"][0]["logprobs"][
        "text_offset"
    ]


def test_offsets_are_those_in_the_text_of_which_special_tokens_are_no_part() -> None:
    assert offsets(4, 1, 4, 1, 4) == [0, 0, 2, 2, 4]
    assert offsets(*[4] * 20, 1, 1) == [0] * 21 + [2]


def test_offsets_where_the_text_begins_without_the_space_of_its_first_token() -> None:
    def stripped(tokens: Sequence[int]) -> str:
        return decode(tokens).removeprefix(" ")

    assert offsets(2, 3, 1, decode=stripped) == [0, 0, 2]
    assert offsets(4, 2, 3, 2, 3, 1, decode=stripped) == [0, 0, 0, 2, 3, 5]


def test_offsets_behind_bytes_that_are_no_character() -> None:
    assert offsets(1, 2, 1, 2, 3) == [0, 2, 4, 6, 7]
    assert offsets(*[2] * 30) == list(range(0, 60, 2))


def test_failed_batch_line_says_so_twice() -> None:
    line = written(CHAT, REFUSED)
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"] == {
        "error": {
            "message": "n must be 1",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }
    assert line["error"] == {"code": "invalid_value", "message": "n must be 1"}


def test_failed_outcome() -> None:
    error = RowError(status=500, code="nan_logits", message="layer 3")
    request = outcome().request
    line = written(CHAT, Outcome(request=request, error=error))
    assert line["response"]["status_code"] == 500
    assert line["response"]["body"]["error"]["type"] == "server_error"


def test_row_that_could_not_be_read_names_its_place() -> None:
    line = written(Row(index=3, line=9), REFUSED)
    assert line["custom_id"] is None
    assert line["error"]["message"] == "line 9: n must be 1"
    line = written(Row(index=3), REFUSED, fallback="plain")
    assert line["response"]["error"]["message"] == "row 4: n must be 1"


def test_plain_row_keeps_its_columns() -> None:
    assert written(PLAIN, outcome(choice())) == {
        "id": "a",
        "prompt": "x",
        "score": 0.1,
        "response": {
            "custom_id": "a",
            "text": "Hi",
            "finish_reason": "stop",
            "stop_reason": None,
            "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
            "error": None,
        },
    }


def test_plain_row_with_several_answers_and_another_column() -> None:
    found = outcome(choice(logprobs=LOGPROBS[2:]), choice("Ho", logprobs=()), n=2, logprobs=0)
    answer = written(PLAIN, found, column="answer")["answer"]
    assert answer["text"] == ["Hi", "Ho"]
    assert answer["finish_reason"] == ["stop", "stop"]
    assert answer["logprobs"][0]["content"][0]["token"] == "Hi"


def test_failed_plain_row() -> None:
    line = written(PLAIN, REFUSED)
    assert line["prompt"] == "x"
    assert line["response"] == {
        "custom_id": "a",
        "text": None,
        "finish_reason": None,
        "stop_reason": None,
        "usage": None,
        "error": {
            "status": 400,
            "line": 4,
            "message": "n must be 1",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        },
    }


def test_other_dialect_than_the_row() -> None:
    assert written(PLAIN, outcome(choice()), format="openai")["response"]["status_code"] == 200
    line = written(CHAT, outcome(choice()), format="plain")
    assert (line["custom_id"], line["response"]["text"]) == ("a", "Hi")


def test_same_row_same_bytes() -> None:
    assert result_line(CHAT, outcome(choice()), SERVED) == result_line(
        CHAT, outcome(choice()), SERVED
    )
    other = Row(index=4, line=4, custom_id="b", dialect="openai")
    assert written(CHAT, REFUSED)["id"] != written(other, REFUSED)["id"]


SURROGATES = st.text(st.characters(codec=None), max_size=20)


@given(SURROGATES, SURROGATES, st.floats(), st.sampled_from(["auto", "openai", "plain"]))
def test_any_answer_is_strict_json(text: str, stop: str, logprob: float, form: str) -> None:
    logprobs = (TokenLogprob(token=2, logprob=logprob, top={3: logprob}),)
    found = outcome(choice(text, stop_reason=stop, logprobs=logprobs), logprobs=1)
    for row in (CHAT, PLAIN):
        written(row, found, format=form)


def test_texts_are_written_as_they_are_and_only_half_a_surrogate_pair_is_escaped() -> None:
    line = result_line(CHAT, outcome(choice("Grüße 😀 \u2028 \ud83d!")), SERVED)
    assert "Grüße 😀 \u2028 \\ud83d!".encode() in line
    row = replace(PLAIN, columns='{"prompt":"Où?"}'.encode())
    assert result_line(row, REFUSED, SERVED).startswith('{"prompt":"Où?",'.encode())
