"""From a line to a parsed row: what is understood, and every way a line can be wrong."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.rows.parse import RowRules, parse_row
from moebatch.rows.row import Base64, Chat, FailedRow, ParsedRow, RawRow
from moebatch.spec.prompt_template import PromptTemplate
from moebatch.spec.request import RowError


def parse(content: Any, **rules: Any) -> ParsedRow | FailedRow:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return parse_row(RawRow(index=4, line=7, content=data), RowRules(**rules))


def good(content: Any, **rules: Any) -> ParsedRow:
    parsed = parse(content, **rules)
    assert isinstance(parsed, ParsedRow), parsed
    return parsed


def bad(content: Any, **rules: Any) -> RowError:
    parsed = parse(content, **rules)
    assert isinstance(parsed, FailedRow), parsed
    assert parsed.error.status == 400
    return parsed.error


def batch(body: Any = None, **changes: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}]} if body is None else body
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return {key: value for key, value in (line | changes).items() if value is not ...}


class TestBatchLines:
    def test_chat(self) -> None:
        messages = [{"role": "user", "content": "Hi", "name": None}]
        body = {"model": "m", "messages": messages, "temperature": 0.5, "top_p": None}
        parsed = good(batch(body))
        assert parsed.prompt == Chat(messages=({"role": "user", "content": "Hi"},))
        assert parsed.parameters == {"temperature": 0.5, "top_p": None}
        row = parsed.row
        assert (row.index, row.line, row.custom_id, row.dialect) == (4, 7, "a", "openai")
        assert (row.kind, row.model, row.columns, row.place) == ("chat", "m", b"", "line 7")

    @pytest.mark.parametrize(
        ("prompt", "understood"),
        [("Hi", "Hi"), ([1, 2], (1, 2)), (["Hi"], "Hi"), ([[1, 2]], (1, 2)), ("", ""), ([], ())],
    )
    def test_completion(self, prompt: object, understood: object) -> None:
        parsed = good(batch({"prompt": prompt}, url="/v1/completions"))
        assert parsed.prompt == understood
        assert parsed.row.kind == "completion"

    def test_template_options(self) -> None:
        message = {"role": "assistant", "content": [{"type": "text", "text": "a"}] * 2}
        body = {"messages": [message], "chat_template_kwargs": {"x": 1, "of other rows": None}}
        parsed = good(batch(body | {"continue_final_message": True}))
        assert parsed.prompt == Chat(
            messages=({"role": "assistant", "content": "a\na"},),
            variables={"x": 1},
            add_generation_prompt=False,
            continue_final_message=True,
        )
        assert parsed.parameters == {}

    @pytest.mark.parametrize(
        ("line", "code", "param", "message"),
        [
            (batch(custom_id=...), "missing_required_parameter", "custom_id", "is missing"),
            (batch(custom_id=5), "invalid_value", "custom_id", "must be a text that is not empty"),
            (batch(custom_id=""), "invalid_value", "custom_id", "must be a text that is not empty"),
            (batch(method=...), "missing_required_parameter", "method", "is missing"),
            (batch(method="GET"), "invalid_value", "method", "must be \"POST\", got 'GET'"),
            (batch(url=...), "missing_required_parameter", "url", "is missing"),
            (batch(url="/v1/embeddings"), "url_mismatch", "url", "got '/v1/embeddings'"),
            (batch(url=[]), "url_mismatch", "url", "got []"),
            (batch(url="/v1/completions"), "url_mismatch", "messages", "does not take"),
            (batch({"prompt": "x"}), "url_mismatch", "prompt", "does not take"),
            (batch(body=...), "missing_required_parameter", "body", "is missing"),
            (batch([1]), "invalid_value", "body", "must be an object, got [1]"),
            (batch({}), "missing_required_parameter", "messages", "is missing"),
            *(
                (batch(**{name: 1}), "unsupported_parameter", name, "it belongs inside")
                for name in ("temperature", "max_completion_tokens", "tools", "response_format")
            ),
            (batch({"model": 5}), "invalid_value", "model", "must be a text, got 5"),
            (batch({"model": "x"}), "model_mismatch", "model", "is not the one of this job, 'm'"),
        ],
    )
    def test_refused(self, line: Any, code: str, param: str, message: str) -> None:
        error = bad(line, model_name="m")
        assert (error.code, error.param) == (code, param)
        assert message in error.message

    def test_a_null_beside_the_body_is_of_other_rows_of_a_table(self) -> None:
        assert good(batch(temperature=None, tools=None)).parameters == {}

    def test_variables_of_a_template_are_an_object(self) -> None:
        for variables in ([], "a", 3):
            messages = [{"role": "user", "content": "Hi"}]
            body = {"messages": messages, "chat_template_kwargs": variables}
            failed = parse(batch(body=body))
            assert isinstance(failed, FailedRow)
            assert failed.error.param == "chat_template_kwargs"

    def test_a_row_that_could_not_be_read_fails_for_that(self) -> None:
        error = RowError(status=400, code="invalid_json", message="is damaged")
        failed = parse_row(RawRow(index=3, line=4, content=error), RowRules())
        assert isinstance(failed, FailedRow) and failed.error == error

    def test_what_is_known_stays_known(self) -> None:
        failed = parse(batch(url="/v1/embeddings"))
        assert failed.row.custom_id == "a"
        assert failed.row.dialect == "openai"


class TestMessages:
    @pytest.mark.parametrize(
        ("messages", "code", "param", "message"),
        [
            ("Hi", "invalid_value", "messages", "must be a list of messages, got 'Hi'"),
            ([], "invalid_value", "messages", "must hold at least one message"),
            (["Hi"], "invalid_value", "messages[0]", "must be an object with role and content"),
            ([{"content": "Hi"}], "invalid_value", "messages[0].role", "must be a text such as"),
            ([{"role": 1}], "invalid_value", "messages[0].role", "got 1"),
            ([{"role": "user"}], "missing_required_parameter", "messages[0].content", "is missing"),
            ([{"role": "user", "content": 5}], "invalid_value", "messages[0].content", "got 5"),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                "unsupported_parameter",
                "messages[0].content[0]",
                "is a part of type 'image_url'; only text is supported",
            ),
            (
                [{"role": "user", "content": [{"type": "text"}]}],
                "invalid_value",
                "messages[0].content[0].text",
                "must be a text, got null",
            ),
            (
                [{"role": "assistant", "tool_calls": "f()"}],
                "invalid_value",
                "messages[0].tool_calls",
                "must be a list of objects, got 'f()'",
            ),
            (
                [{"role": "assistant", "function_call": {"name": "f"}}],
                "unsupported_parameter",
                "messages[0].function_call",
                "is not supported; tool_calls are",
            ),
            (
                [{"role": "user", "content": ["Hi"]}],
                "invalid_value",
                "messages[0].content[0]",
                "must be an object with a type, got 'Hi'",
            ),
        ],
    )
    def test_refused(self, messages: Any, code: str, param: str, message: str) -> None:
        error = bad({"messages": messages})
        assert (error.code, error.param) == (code, param)
        assert message in error.message

    def test_both_ends_of_a_template(self) -> None:
        body = {"add_generation_prompt": True, "continue_final_message": True}
        error = bad(batch(body | {"messages": [{"role": "user", "content": "Hi"}]}))
        assert error.message.endswith("cannot be true together with add_generation_prompt")

    def test_tool_calls_need_no_content(self) -> None:
        call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
        prompt = good({"messages": [call]}).prompt
        message = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
        assert prompt == Chat(messages=(message,))


class TestPrompts:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            (5, "must be a text or a list of token ids, got 5"),
            ([1, True], "must hold token ids, got true"),
            ([1, 2.0], "must hold token ids, got 2.0"),
            (["a", "b"], "holds 2 prompts; give each a row of its own"),
            ([[1], [2]], "holds 2 prompts; give each a row of its own"),
            ([{"role": "user", "content": "Hi"}], "is a list of messages; give it the name"),
        ],
    )
    def test_refused(self, prompt: object, message: str) -> None:
        error = bad({"prompt": prompt})
        assert (error.code, error.param) == ("invalid_value", "prompt")
        assert message in error.message


class TestPlainRows:
    def test_columns_and_parameters(self) -> None:
        line = {"prompt": "Hi", "id": 5, "url": "http://x", "body": None, "user": "u"}
        nested = {"top_k": 3, "temperature": None}
        parsed = good(line | {"temperature": 0, "sampling_params": nested})
        assert parsed.prompt == "Hi"
        assert parsed.parameters == {"temperature": 0, "top_k": 3}
        assert (parsed.row.dialect, parsed.row.kind) == ("plain", "completion")
        assert parsed.row.custom_id == "5"
        assert json.loads(parsed.row.columns)["url"] == "http://x"

    @pytest.mark.parametrize(
        ("names", "custom_id"),
        [({"custom_id": "a", "id": "b"}, "a"), ({"id": "b"}, "b"), ({"id": None}, "7"), ({}, "7")],
    )
    def test_names(self, names: dict[str, Any], custom_id: str) -> None:
        assert good({"prompt": "Hi"} | names).row.custom_id == custom_id

    @pytest.mark.parametrize(
        ("line", "dialect"),
        [
            ({"custom_id": "a", "prompt": None, "topic": 1}, "plain"),
            ({"custom_id": "a", "question": "Hi", "url": "http://x"}, None),
            ({"id": "a", "prompt": 5}, "plain"),
        ],
    )
    def test_a_bad_row_keeps_its_name_and_its_columns(self, line: Any, dialect: str | None) -> None:
        failed = parse(line)
        assert isinstance(failed, FailedRow)
        assert (failed.row.custom_id, failed.row.dialect) == ("a", dialect)
        assert json.loads(failed.row.columns) == line

    def test_a_prompt_goes_to_the_model_as_it_stands_and_is_marked_so(self) -> None:
        assert good({"prompt": "Hi"}).row.is_bare
        others = {"prompt": [1]}, {"messages": [{"role": "user", "content": "Hi"}]}
        completion = batch({"prompt": "Hi"}, url="/v1/completions")
        assert not any(good(row).row.is_bare for row in (*others, completion))

    def test_tables_have_rows_instead_of_lines(self) -> None:
        raw = RawRow(index=4, line=None, content={"prompt": "Hi", "messages": None})
        parsed = parse_row(raw, RowRules())
        assert isinstance(parsed, ParsedRow)
        assert parsed.row.custom_id == "5"
        assert parsed.row.place == "row 5"
        assert json.loads(parsed.row.columns) == {"prompt": "Hi", "messages": None}

    @pytest.mark.parametrize(
        ("line", "code", "message"),
        [
            ({}, "no_prompt", "has neither prompt nor messages; its columns are none"),
            ({"id": 1, "url": "x"}, "no_prompt", "its columns are 'id', 'url': input.prompt"),
            ({"prompt": None}, "missing_required_parameter", "prompt is null"),
            ({"prompt": "a", "messages": []}, "invalid_value", "a row may have only one of them"),
            ({"prompt": "a", "id": 1.5}, "invalid_value", "must be a text or a whole number"),
            ({"prompt": "a", "id": True}, "invalid_value", "must be a text or a whole number"),
            ({"prompt": "a", "custom_id": 1}, "invalid_value", "must be a text that is not empty"),
            ({"prompt": "a", "sampling_params": 1}, "invalid_value", "must be an object, got 1"),
            (
                {"prompt": "a", "n": 1, "sampling_params": {"n": 2}},
                "invalid_value",
                "is given twice, in sampling_params and beside it",
            ),
            (
                {"prompt": "a", "sampling_params": {"model": "m"}},
                "unsupported_parameter",
                "belongs beside sampling_params",
            ),
            ({"prompt": "a", "answer": 1}, "column_taken", "choose another name as output.column"),
        ],
    )
    def test_refused(self, line: Any, code: str, message: str) -> None:
        error = bad(line, answer_column="answer")
        assert error.code == code
        assert message in error.message


@pytest.mark.parametrize(
    ("columns", "prompt", "param"),
    [
        ({"prompt": Base64("YWI=")}, None, "prompt"),
        ({"q": Base64("YWI=")}, "q", "q"),
        ({"q": Base64("YWI="), "n": 1}, "{n}: {q}", "q"),
        ({"messages": [{"role": "user", "content": Base64("YWI=")}]}, None, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": Base64("YWI=")}]}]},
            None,
            "messages[0].content[0].text",
        ),
    ],
)
def test_bytes_of_a_table_are_no_text(
    columns: dict[str, Any], prompt: str | None, param: str
) -> None:
    rules = RowRules(prompt=PromptTemplate.parse(prompt) if prompt else None)
    parsed = parse_row(RawRow(index=0, line=None, content=columns), rules)
    assert isinstance(parsed, FailedRow), parsed
    assert parsed.error.param == param
    assert "is binary data" in parsed.error.message
    assert b"YWI=" in parsed.row.columns, "what was there comes back"


class TestPromptsOfColumns:
    def made(self, template: str, line: Any, **rules: Any) -> Any:
        return good(line, prompt=PromptTemplate.parse(template), **rules).prompt

    def refused(self, template: str, line: Any, **rules: Any) -> RowError:
        return bad(line, prompt=PromptTemplate.parse(template), **rules)

    @pytest.mark.parametrize(
        ("template", "prompt"),
        [
            ("question", "Why?"),
            ("{question}", "Why?"),
            ("Q: {question}\nA:", "Q: Why?\nA:"),
            ("{n items} of {{{tags}}} {half} {is it}", '2 of {["a", "ü"]} 0.5 true'),
            ("{prompt}: {messages}", 'x: {"a": 1}'),
        ],
    )
    def test_made(self, template: str, prompt: str) -> None:
        line = {"question": "Why?", "n items": 2, "tags": ["a", "ü"], "half": 0.5, "is it": True}
        assert self.made(template, line | {"prompt": "x", "messages": {"a": 1}}) == prompt

    def test_a_column_may_hold_tokens(self) -> None:
        assert self.made("tokens", {"tokens": [1, 2]}) == (1, 2)

    @pytest.mark.parametrize("name", ["seed", "stop", "tools"])
    def test_a_column_that_is_the_prompt_is_no_parameter(self, name: str) -> None:
        """Datasets have texts in columns of such names."""
        line = {name: "Why?", "top_k": 3}
        for template in (name, f"{{{name}}}"):
            parsed = good(line, prompt=PromptTemplate.parse(template))
            assert (parsed.prompt, parsed.parameters) == ("Why?", {"top_k": 3})
        parsed = good(line, prompt=PromptTemplate.parse(f"Q: {{{name}}}"))
        assert parsed.parameters == line, "it may well be both"

    def test_rows_are_plain_ones_then(self) -> None:
        row = good(batch(), prompt=PromptTemplate.parse("{url}")).row
        assert (row.dialect, row.custom_id) == ("plain", "a")

    @pytest.mark.parametrize(
        ("template", "line", "code", "param", "message"),
        [
            ("a", {"b": 1}, "no_prompt", "a", "has no column 'a', which input.prompt in the job"),
            ("{a}{c}", {"a": 1}, "no_prompt", "c", "its columns are 'a'"),
            ("a", {"a": None}, "missing_required_parameter", "a", "a is null"),
            ("{a}!", {"a": None}, "missing_required_parameter", "a", "a is null"),
            ("a", {"a": 5}, "invalid_value", "a", "a must be a text or a list of token ids, got 5"),
        ],
    )
    def test_refused(self, template: str, line: Any, code: str, param: str, message: str) -> None:
        error = self.refused(template, line)
        assert (error.code, error.param) == (code, param)
        assert message in error.message

    @given(st.text(), st.text())
    def test_any_text_between_columns_stays(self, before: str, value: str) -> None:
        escaped = before.replace("{", "{{").replace("}", "}}")
        assert self.made(f"{escaped}{{a}}{escaped}", {"a": value}) == before + value + before


class TestPromptsAsMessages:
    def test_a_prompt_is_one_message_of_a_user(self) -> None:
        line = {"prompt": "Hi", "chat_template_kwargs": {"x": 1}}
        parsed = good(line, is_chat=True)
        asked = ({"role": "user", "content": "Hi"},)
        assert parsed.prompt == Chat(messages=asked, variables={"x": 1})
        assert (parsed.row.kind, parsed.row.is_bare) == ("chat", False)
        made = good({"q": "Hi"}, is_chat=True, prompt=PromptTemplate.parse("q"))
        assert made.prompt == Chat(messages=asked)

    def test_what_is_no_plain_prompt_stays_as_it_is(self) -> None:
        assert good(batch({"prompt": "Hi"}, url="/v1/completions"), is_chat=True).prompt == "Hi"
        messages = [{"role": "system", "content": "Hi"}]
        assert good({"messages": messages}, is_chat=True).prompt == Chat(messages=tuple(messages))

    def test_tokens_are_no_message(self) -> None:
        error = bad({"prompt": [1]}, is_chat=True)
        assert "holds token ids, of which input.chat can make no message" in error.message


class TestStrictJson:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b'{"prompt": "cut of', "not JSON: Unterminated string starting at (column 12)"),
            (b"hello", "not JSON: Expecting value (column 1)"),
            (
                b"{} {}",
                "not JSON: more follows where the line must end, one row on each (column 4)",
            ),
            (b"[1]", 'must be an object such as {"prompt": …}, got [1]'),
            (b"null", 'must be an object such as {"prompt": …}, got null'),
            (b'{"prompt": "\xff"}', "not UTF-8 text (byte 13 of the line); save it as UTF-8"),
            (
                '{"prompt": "a"}'.encode("utf-16"),
                "not UTF-8 text (byte 1 of the line); save it as UTF-8",
            ),
            (b'{"prompt": "\\ud800"}', "half of a surrogate pair, which is no character"),
            (
                b'{"prompt": "\xed\xa0\x80"}',
                "not UTF-8 text (byte 13 of the line); save it as UTF-8",
            ),
            (b'{"\\udfff": 1}', "half of a surrogate pair, which is no character"),
            (b'{"n": NaN}', "NaN is not JSON"),
            (b'{"n": -Infinity}', "-Infinity is not JSON"),
            (b'{"n": 1e999}', "the number 1e999 is too large"),
            (b'{"n": ' + b"1" * 5000 + b"}", "holds a whole number of thousands of digits"),
            (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' is given twice"),
            (b'{"b": {"a": 1, "a": 1}}', "the key 'a' is given twice"),
            (b'{"a": ' + b"[" * 100_000, "nested deeper than 100 levels"),
            (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than 100 levels"),
            (
                b'{"prompt": "a\tb"}',
                r"not JSON: a control character must be written as \t (column 14)",
            ),
        ],
    )
    def test_refused(self, line: bytes, message: str) -> None:
        error = bad(line)
        assert error.code == "invalid_json_line"
        assert error.message == message

    def test_accepted(self) -> None:
        text = "\u2028\x85 \U0001f600\r"
        assert good(json.dumps({"prompt": text}).encode()).prompt == text
        assert good(json.dumps({"prompt": text}, ensure_ascii=False).encode()).prompt == text
        deep = b'{"prompt": "a", "x": ' + b"[" * 98 + b"]" * 98 + b"}"
        assert good(deep).prompt == "a"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["custom_id", "method", "url", "body", "prompt", "messages", "id", "sampling_params", "model"]
)
OBJECTS = st.dictionaries(KEYS, JSON | st.sampled_from(["POST", "/v1/completions"]))


@pytest.mark.parametrize(
    "name", ["best_of", "echo", "stream", "response_format", "tools", "reasoning_effort"]
)
def test_parameters_of_plain_rows_are_never_ignored(name: str) -> None:
    assert good({"prompt": "x", name: 1}).parameters == {name: 1}


@pytest.mark.parametrize("line", [{"prompt": "x"}, {"prompt": [1]}])
@pytest.mark.parametrize("put", [dict, lambda body: batch(body, url="/v1/completions")])
def test_what_is_asked_of_a_chat_template_is_not_ignored_where_a_prompt_fills_none(
    line: dict[str, Any], put: Any
) -> None:
    asked = {"chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}
    assert good(put(line | asked)).parameters == asked
    assert good({**line, "sampling_params": asked}).parameters == asked


@given(st.binary(max_size=200))
def test_any_bytes_never_raise(data: bytes) -> None:
    assert isinstance(parse(data), ParsedRow | FailedRow)


@given(OBJECTS, JSON)
def test_any_json_never_raises(content: dict[str, Any], body: Any) -> None:
    for line in (content, batch(content), batch(body), body, {"messages": body}):
        parsed = parse(json.dumps(line).encode())
        assert isinstance(parsed, ParsedRow | FailedRow)
