"""Parameters of rows, jobs and models: precedence, ranges, and what is refused by name."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.rows.parameters import Defaults, merge_defaults
from moebatch.rows.refused import RowRefused
from moebatch.rows.row import ParsedRow, Row
from moebatch.spec.job import SamplingSection
from moebatch.spec.request import RowError
from moebatch.spec.sampling import Sampling

VOCABULARY = 100


def defaults(model: Any = None, **job: Any) -> Defaults:
    section = SamplingSection.model_validate(job)
    return merge_defaults(section, model or {}, vocab_size=VOCABULARY)


def resolve(
    parameters: dict[str, Any],
    base: Defaults | None = None,
    *,
    kind: Any = "chat",
    dialect: Any = "openai",
) -> Sampling:
    row = Row(index=0, custom_id="a", kind=kind, dialect=dialect)
    parsed = ParsedRow(row=row, prompt="x", parameters=parameters)
    return (base or defaults()).resolve(parsed)


def refused(parameters: dict[str, Any], base: Defaults | None = None, **row: Any) -> RowError:
    with pytest.raises(RowRefused) as caught:
        resolve(parameters, base, **row)
    return caught.value.error


class TestPrecedence:
    def test_row_over_job_over_model_over_library(self) -> None:
        model = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": False}
        base = defaults(model, top_p=0.8, top_k=7)
        found = resolve({"top_k": 3}, base)
        assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.6, 0.8, 3, 0.0)
        assert base.sampling == Sampling(temperature=0.6, top_p=0.8, top_k=7)

    def test_max_new_tokens_of_the_model(self) -> None:
        assert defaults({"max_new_tokens": 99, "top_k": None}).sampling.max_tokens == 99

    def test_nothing_said(self) -> None:
        assert resolve({}) == Sampling()

    def test_seed_of_the_job_is_no_seed_of_rows(self) -> None:
        assert resolve({}, defaults(seed=5)).seed is None

    def test_null_is_not_given(self) -> None:
        assert resolve({"top_p": None, "nonsense": None}, defaults(top_p=0.5)).top_p == 0.5

    def test_nor_is_a_null_with_which_a_table_fills_a_mapping(self) -> None:
        found = resolve({"logit_bias": {"5": 1, "6": None}, "mm_processor_kwargs": {"a": None}})
        assert found.logit_bias == {5: 1.0}
        assert resolve({"response_format": {"type": "text", "json_schema": None}}) == Sampling()

    def test_all_of_a_row(self) -> None:
        given = {
            "max_tokens": 5,
            "temperature": 1,
            "top_p": 1,
            "top_k": -1,
            "min_p": 0,
            "n": 3,
            "seed": 7,
            "stop": "x",
            "stop_token_ids": [3, 4],
            "ignore_eos": True,
            "min_tokens": 2,
            "presence_penalty": -2,
            "frequency_penalty": 2,
            "repetition_penalty": 1.5,
            "logit_bias": {"5": -100, "6": 1},
        }
        expected = given | {
            "top_k": 0,
            "stop": ("x",),
            "stop_token_ids": frozenset({3, 4}),
            "logit_bias": {5: -100.0, 6: 1.0},
        }
        assert resolve(given) == Sampling(**expected)

    def test_seed_of_vllm_for_none(self) -> None:
        assert resolve({"seed": -1}).seed is None

    def test_wrong_defaults_of_the_model(self) -> None:
        with pytest.raises(RowRefused) as caught:
            defaults({"temperature": 5})
        assert "generation_config.json of the model has a temperature" in str(caught.value)
        assert "must be a number from 0 to 2, got 5" in str(caught.value)

    @pytest.mark.parametrize(
        ("job", "message"),
        [
            ({"stop_token_ids": [100]}, "holds the token id 100, but the model has 100 tokens"),
            ({"logit_bias": {"7000": 1}}, "holds the token id 7000, but the model has 100"),
        ],
    )
    def test_tokens_of_the_job(self, job: dict[str, Any], message: str) -> None:
        with pytest.raises(RowRefused, match=message):
            defaults(**job)

    def test_job_against_model(self) -> None:
        with pytest.raises(RowRefused, match="n is 2, but temperature 0"):
            defaults({"temperature": 0}, n=2)


class TestLimit:
    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    def test_either_name(self, name: str) -> None:
        found = resolve({name: 5}, defaults(max_tokens=9))
        assert found.max_tokens == 5

    def test_both_names(self) -> None:
        assert resolve({"max_tokens": 5, "max_completion_tokens": 5}).max_tokens == 5
        error = refused({"max_tokens": 5, "max_completion_tokens": 6})
        assert error.message == "max_completion_tokens is 6, but max_tokens is 5; give one"


class TestLogprobs:
    @pytest.mark.parametrize(
        ("kind", "parameters", "expected"),
        [
            ("chat", {"logprobs": True}, 0),
            ("chat", {"logprobs": True, "top_logprobs": 20}, 20),
            ("chat", {"logprobs": False}, None),
            ("chat", {"logprobs": False, "top_logprobs": 0}, None),
            ("chat", {}, 4),
            ("completion", {"logprobs": 0}, 0),
            ("completion", {"logprobs": 5}, 5),
            ("completion", {}, 4),
        ],
    )
    def test_forms(self, kind: str, parameters: dict[str, Any], expected: int | None) -> None:
        assert resolve(parameters, defaults(logprobs=4), kind=kind).logprobs == expected

    def test_plain_rows_may_use_both(self) -> None:
        for kind in ("chat", "completion"):
            assert resolve({"logprobs": 2}, kind=kind, dialect="plain").logprobs == 2
            both = {"logprobs": True, "top_logprobs": 2}
            assert resolve(both, kind=kind, dialect="plain").logprobs == 2

    @pytest.mark.parametrize(
        ("kind", "parameters", "message"),
        [
            ("chat", {"logprobs": 5}, "logprobs must be true or false, got 5"),
            ("chat", {"top_logprobs": 5}, "top_logprobs is 5 without logprobs: true, got null"),
            ("chat", {"logprobs": True, "top_logprobs": 21}, "from 0 to 20, got 21"),
            ("chat", {"logprobs": True, "top_logprobs": True}, "from 0 to 20, got true"),
            ("completion", {"logprobs": True}, "logprobs must be a whole number from 0 to 20"),
            ("completion", {"logprobs": 21}, "logprobs must be a whole number from 0 to 20"),
            ("completion", {"top_logprobs": 1}, "top_logprobs is for chats"),
        ],
    )
    def test_refused(self, kind: str, parameters: dict[str, Any], message: str) -> None:
        error = refused(parameters, kind=kind)
        assert error.code == "invalid_value"
        assert message in error.message


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("max_tokens", True),
            ("max_tokens", 0),
            ("max_completion_tokens", 1.5),
            ("temperature", 2.5),
            ("temperature", "1"),
            ("temperature", 10**400),
            ("top_p", 0),
            ("top_p", 1.01),
            ("top_k", -2),
            ("top_k", 1.0),
            ("min_p", -0.1),
            ("n", True),
            ("n", 0),
            ("n", 10**9),
            ("seed", 1.5),
            ("seed", 2**63),
            ("stop", ""),
            ("stop", ["a", ""]),
            ("stop", 1),
            ("stop_token_ids", [100]),
            ("stop_token_ids", [True]),
            ("stop_token_ids", "1"),
            ("ignore_eos", 1),
            ("min_tokens", -1),
            ("min_tokens", 257),
            ("presence_penalty", 2.1),
            ("frequency_penalty", []),
            ("repetition_penalty", 0),
            ("repetition_penalty", 10**400),
            ("logit_bias", []),
            ("logit_bias", {"a": 1}),
            ("logit_bias", {"-1": 1}),
            ("logit_bias", {"100": 1}),
            ("logit_bias", {"1": 101}),
            ("logit_bias", {"1": True}),
            ("logit_bias", {"9" * 5000: 1}),
        ],
    )
    def test_ranges(self, name: str, value: object) -> None:
        error = refused({name: value})
        assert (error.status, error.code, error.param) == (400, "invalid_value", name)
        assert error.message.startswith(name)

    def test_several_greedy_answers(self) -> None:
        assert refused({"n": 2}, defaults(temperature=0)).message == (
            "n is 2, but temperature 0 always takes the likeliest token, so all answers would be "
            "the same; set n to 1 or temperature above 0"
        )

    def test_fewest_above_most(self) -> None:
        error = refused({"min_tokens": 6, "max_tokens": 5})
        assert error.message == "min_tokens is 6, more than max_tokens, which is 5"

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("stream", True, "stream is not supported, got true; allowed is false"),
            ("stream", 0, "stream is not supported, got 0; allowed is false"),
            ("stream_options", {}, "stream_options is not supported, got {}"),
            ("functions", [1], "functions is not supported"),
            ("best_of", 2, "best_of is not supported, got 2; allowed is 1"),
            ("best_of", True, "best_of is not supported, got true"),
            ("echo", True, "echo is not supported"),
            ("prompt_logprobs", 0, "prompt_logprobs is not supported, got 0"),
            ("suffix", "x", "suffix is not supported"),
            ("truncate_prompt_tokens", 5, "moebatch has no such parameter"),
            (
                "temprature",
                0.5,
                "temprature is not supported, got 0.5; moebatch has no such parameter",
            ),
            ("reasoning_effort", "low", "chat_template_kwargs may set it"),
            (
                "chat_template_kwargs",
                {"enable_thinking": False},
                "chat_template_kwargs is for messages, but the prompt goes to the model unchanged",
            ),
            ("continue_final_message", True, "is for messages, but the prompt"),
            ("add_generation_prompt", 1, "is for messages, but the prompt"),
        ],
    )
    def test_unsupported(self, name: str, value: object, message: str) -> None:
        error = refused({name: value})
        assert (error.code, error.param) == ("unsupported_parameter", name)
        assert message in error.message

    def test_neutral_and_harmless(self) -> None:
        neutral = {
            "stream": False,
            "echo": False,
            "best_of": 1,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "response_format": {"type": "text"},
            "suffix": "",
            "user": "u",
            "metadata": {"a": 1},
            "store": True,
            "service_tier": "flex",
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "chat_template_kwargs": {},
            "add_generation_prompt": True,
            "continue_final_message": False,
            "anything": None,
        }
        assert resolve(neutral) == Sampling()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
NAMES = st.sampled_from([*Sampling.__dataclass_fields__, "top_logprobs", "max_completion_tokens"])


@given(
    st.dictionaries(NAMES | st.text(max_size=5), VALUES), st.sampled_from(["chat", "completion"])
)
def test_any_value_is_resolved_or_refused(parameters: dict[str, Any], kind: str) -> None:
    try:
        resolved = resolve(parameters, kind=kind)
    except RowRefused as refusal:
        assert refusal.error.param is not None
    else:
        assert resolved.max_tokens >= 1
        assert isinstance(resolved.temperature, float)
