"""Tools that rows offer, and calls that models write, each in the form of its chat template."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from moebatch.errors import ConfigError
from moebatch.rows.dialects import Served, result_line
from moebatch.rows.prompts import RowReader, open_reader
from moebatch.rows.repeats import RepeatCounter, Repeats, greedy_key
from moebatch.rows.row import FailedRow, RawRow, ReadyRow
from moebatch.rows.tool_calls import FORMS
from moebatch.spec.job import Job
from moebatch.spec.request import Choice, FinishReason, Outcome, RowError
from moebatch.spec.tools import ToolChoice, Tools, grammar_of_calls, tool_choice, tools
from tests.tiny import write_tokenizer

END = "<|done|>"
MESSAGES = [{"role": "user", "content": "Is it cold?"}]


def function(name: str, parameters: Any = None) -> dict[str, Any]:
    said = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": said}


WEATHER = function(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "at": {"$ref": "#/$defs/place"},
            "unit": {"anyOf": [{"type": "null"}, {"enum": ["C", "F"]}]},
        },
        "required": ["city"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "array", "items": {"type": "integer"}}},
            }
        },
    },
)
NOW = function("now")
TOOLS = [WEATHER, NOW]
SHOW = (
    "{% for m in messages %}{{ m.content }}"
    "{% for t in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"
)
OFFER = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALLS = "{% set f = t.function %}"
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>")
DEEPSEEK = tuple(
    f"<｜tool▁{each}｜>" for each in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
KIMI = tuple(
    f"<|tool_{each}|>"
    for each in (
        *("calls_section_begin", "calls_section_end"),
        *("call_begin", "call_argument_begin", "call_end"),
    )
)
LLAMA = '{# {"name": function name, "parameters": dictionary of argument name and its value} #}'
PAIRS = "{% for k, v in f.arguments.items() %}%s{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"
FORM_OF: dict[str, tuple[tuple[str, ...], str]] = {
    "gpt-oss": (
        HARMONY,
        "<|channel|>commentary to={{ 'functions.' + f.name }} <|constrain|>json<|message|>"
        "{{ f.arguments | tojson }}<|call|>",
    ),
    "gemma-4": (
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
        "{% macro show(v) %}{% if v is string %}"
        '<|"|>{{ v }}<|"|>{% elif v is mapping %}'
        "{{ '{' }}{% for k, w in v.items() %}{{ k }}:{{ show(w) }}"
        "{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}"
        "{% elif v is iterable %}[{% for w in v %}{{ show(w) }}{{ '' if loop.last else ',' }}"
        "{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
        "<|tool_call>call:{{ f.name }}{{ show(f.arguments) }}<tool_call|>",
    ),
    "deepseek-v3": (
        DEEPSEEK,
        "{% if loop.first %}<｜tool▁calls▁begin｜>{% else %}\n{% endif %}<｜tool▁call▁begin｜>"
        "function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
        "<｜tool▁call▁end｜>"
        "{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}",
    ),
    "deepseek-v3.1": (
        DEEPSEEK,
        "{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}<｜tool▁call▁begin｜>{{ f.name }}"
        "<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>"
        "{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}",
    ),
    "kimi-k2": (
        KIMI,
        "{% if loop.first %}<|tool_calls_section_begin|>{% endif %}<|tool_call_begin|>functions."
        "{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
        "<|tool_call_end|>{% if loop.last %}<|tool_calls_section_end|>{% endif %}",
    ),
    "minimax-m2": (
        (),
        "{% if loop.first %}<minimax:tool_call>\n{% endif %}"
        '<invoke name="{{ f.name }}">\n'
        + PAIRS.replace("%s", f'<parameter name="{{{{ k }}}}">{VALUE}</parameter>\n')
        + "</invoke>\n{% if loop.last %}</minimax:tool_call>{% endif %}",
    ),
    "minimax-m3": (
        ("]<]minimax[>[",),
        "{% set ns = ']<]minimax[>[' %}"
        "{% macro show(v) %}{% if v is string %}{{ v }}{% elif v is mapping %}"
        "{% for k, w in v.items() %}{{ ns }}<{{ k }}>{{ show(w) }}{{ ns }}</{{ k }}>{% endfor %}"
        "{% elif v is iterable %}{% for w in v %}{{ ns }}<item>{{ show(w) }}{{ ns }}</item>"
        "{% endfor %}{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
        "{% if loop.first %}{{ ns }}<tool_call>\n{% endif %}"
        '{{ ns }}<invoke name="{{ f.name }}">{{ show(f.arguments) }}{{ ns }}</invoke>\n'
        "{% if loop.last %}{{ ns }}</tool_call>{% endif %}",
    ),
    "qwen3-coder": (
        (),
        "\n<tool_call>\n<function={{ f.name }}>\n"
        + PAIRS.replace("%s", f"<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n")
        + "</function>\n</tool_call>",
    ),
    "glm-4.5": (
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "\n<tool_call>{{ f.name }}\n"
        + PAIRS.replace("%s", f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n")
        + "</tool_call>",
    ),
    "hermes": (
        (),
        '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
        "\n</tool_call>",
    ),
    "mistral": (
        ("[TOOL_CALLS]",),
        "{% if loop.first %}[TOOL_CALLS] [{% else %}, {% endif %}"
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "123456789"}'
        "{% if loop.last %}]{% endif %}",
    ),
    "mistral-later": (
        ("[TOOL_CALLS]", "[ARGS]"),
        "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
    ),
    "deepseek-v3.2": (
        ("｜DSML｜",),
        "{% if loop.first %}\n<｜DSML｜function_calls>{% endif %}\n"
        '<｜DSML｜invoke name="{{ f.name }}">\n'
        + PAIRS.replace(
            "%s",
            '<｜DSML｜parameter name="{{ k }}" string="'
            "{{ 'true' if v is string else 'false' }}\">"
            f"{VALUE}</｜DSML｜parameter>\n",
        )
        + "</｜DSML｜invoke>{% if loop.last %}\n</｜DSML｜function_calls>{% endif %}",
    ),
    "cohere": (
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        "{% if loop.first %}<|START_ACTION|>[{% else %},{% endif %}\n    "
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": '
        "{{ f.arguments | tojson }}}{% if loop.last %}\n]<|END_ACTION|>{% endif %}",
    ),
    "minimax-m1": (
        (),
        "{% if loop.first %}<tool_calls>\n{% endif %}"
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n'
        "{% if loop.last %}</tool_calls>{% endif %}",
    ),
    "lfm2": (
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        "{# List of tools: <|im_start|> #}"
        "{% if loop.first %}<|tool_call_start|>[{% else %}, {% endif %}{{ f.name }}("
        "{% for k, v in f.arguments.items() %}{{ k }}="
        "{{ '\"' ~ v ~ '\"' if v is string else v | tojson if v is mapping else v }}"
        "{{ '' if loop.last else ', ' }}{% endfor %})"
        "{% if loop.last %}]<|tool_call_end|>{% endif %}",
    ),
    "llama": (
        (),
        LLAMA + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    ),
}
ONE_CALL = frozenset({"gpt-oss", "llama"})
ALONE = frozenset({"llama"})
Open = Callable[..., RowReader]


@pytest.fixture
def reader(tmp_path: Path) -> Open:
    """Of rows for a model with a chat template, whose tokenizer has some special tokens."""

    def make(template: str, *special: str, ends: str = "", **sections: Any) -> RowReader:
        write_tokenizer(tmp_path)
        tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
        tokenizer.add_tokens([*special, END], special_tokens=True)
        tokenizer.add_tokens(["<think>", "</think>"] if "<think>" in template else [])
        tokenizer.save_pretrained(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(template)
        end = tokenizer.convert_tokens_to_ids(ends or END)
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": end}))
        paths: dict[str, Any] = {
            "model": {"path": str(tmp_path)},
            "input": {"path": "i"},
            "output": {"path": "o"},
        }
        merged = {key: paths.get(key, {}) | sections.get(key, {}) for key in paths | sections}
        job = Job.model_validate(merged)
        return open_reader(job, vocab_size=512, max_positions=4096)

    return make


def of_form(make: Open, name: str, **sections: Any) -> RowReader:
    special, call = FORM_OF[name]
    return make(OFFER + SHOW.replace("%s", CALLS + call), *special, **sections)


def ready(reader: RowReader, **row: Any) -> ReadyRow:
    content = json.dumps({"messages": MESSAGES, **row}).encode()
    found = reader.request(RawRow(index=0, line=1, content=content))
    assert isinstance(found, ReadyRow), found
    return found


def refused(reader: RowReader, **row: Any) -> RowError:
    content = json.dumps({"messages": MESSAGES, **row}).encode()
    found = reader.request(RawRow(index=0, line=1, content=content))
    assert isinstance(found, FailedRow), found
    return found.error


def tokens_of(reader: RowReader, text: str) -> tuple[int, ...]:
    tokenizer = reader.tokenizer
    return tokenizer.encode(text)[len(tokenizer.encode("")) :]


def answered(
    reader: RowReader,
    text: str,
    *,
    ended: FinishReason = "stop",
    stop: str | None = None,
    as_plain: bool = False,
    thought_in_text: bool = False,
    **row: Any,
) -> Any:
    """What is written where a model answers a row with tools so."""
    found = ready(reader, **{"tools": TOOLS, **row})
    tokens = tokens_of(reader, text)
    by_token = ended == "stop" and stop is None and not text.endswith("<|call|>")
    plain = reader.tokenizer.decode(tokens)
    choice = Choice(
        index=0,
        tokens=(*tokens, *tokens_of(reader, END)) if by_token else tokens,
        text=plain if stop is None else plain[: plain.rindex(stop)],
        finish_reason=ended,
        stop_reason=stop,
    )
    served = Served(
        model="m",
        token_bytes=reader.tokenizer.token_bytes,
        decode=reader.tokenizer.decode,
        calls=reader.tokenizer.calls if reader.splits_calls else None,
        splits_reasoning=not thought_in_text,
        format="plain" if as_plain else "openai",
    )
    outcome = Outcome(request=found.request, choices=(choice,))
    line = json.loads(result_line(found.row, outcome, served))
    return line["response"] if as_plain else line["response"]["body"]["choices"][0]


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls", [])
    assert all(set(call) == {"id", "type", "function"} for call in calls)
    functions = [call["function"] for call in calls]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


def written(reader: RowReader, said: list[tuple[str, Any]], content: str = "") -> str:
    """Calls as the chat template shows them to the model."""
    calls = [
        {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in said
    ]
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    prompt = ready(reader, messages=[message]).request.prompt_tokens
    return b"".join(map(reader.tokenizer.token_bytes, prompt)).decode()


COLD = {"city": "Oslo", "days": 2, "exact": True, "at": {"x": [1, 2], "note": "ü"}}


class TestForms:
    @pytest.mark.parametrize("form", FORM_OF)
    def test_what_the_template_shows_is_what_is_read(self, reader: Open, form: str) -> None:
        found = of_form(reader, form)
        said: list[tuple[str, Any]] = [("weather", COLD), ("now", {}), ("weather", {"city": "<b>"})]
        said = said[:1] if form in ONE_CALL else said
        choice = answered(found, written(found, said))
        assert calls_of(choice) == said
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize("form", [form for form in FORM_OF if form not in ALONE])
    def test_what_stands_before_calls_is_the_text(self, reader: Open, form: str) -> None:
        found = of_form(reader, form)
        before = "I look at 😀"
        said = before + written(found, [("now", {})])
        if form == "gpt-oss":
            between = "<|end|><|start|>assistant<|channel|>commentary"
            said = f"<|channel|>final<|message|>{said}".replace("<|channel|>commentary", between)
        choice = answered(found, said)
        assert calls_of(choice) == [("now", {})]
        assert choice["message"]["content"] == before

    @pytest.mark.parametrize("form", FORM_OF)
    def test_a_call_that_was_cut_off_stays_in_the_text(self, reader: Open, form: str) -> None:
        found = of_form(reader, form)
        whole = written(found, [("weather", COLD)])
        for num_kept in range(1, len(whole)):
            text = whole[:num_kept]
            choice = answered(found, text, ended="length")
            assert choice["finish_reason"] == "length"
            calls = calls_of(choice)
            assert calls in ([], [("weather", COLD)]), "nothing is made up"
            content = choice["message"]["content"]
            plain = found.tokenizer.decode(tokens_of(found, text))
            if calls:
                assert content is None or content in whole[-40:], "the end of a mark"
            elif "city" in text:
                assert content == text.lstrip("\n"), "nothing is lost"
            elif form != "gpt-oss":  # whose header is none before its end
                assert content in (plain.lstrip("\n"), text.lstrip("\n"))

    @pytest.mark.parametrize("form", FORM_OF)
    def test_what_is_no_call_stays_in_the_text(self, reader: Open, form: str) -> None:
        found = of_form(reader, form)
        whole = written(found, [("weather", {"city": "Oslo"})])
        for text in ("4", '{"a": 1}', "[1]", whole.replace("weather", "")):
            choice = answered(found, text)
            assert calls_of(choice) == []
            assert choice["finish_reason"] == "stop"

    @pytest.mark.parametrize(
        "text",
        [
            '{"name": "Ada", "parameters": {}}',
            '{"name": "now", "born": 1815}',
            '{"name": "now", "parameters": {}, "born": 1815}',
            '{"name": "now", "parameters": 5}',
        ],
    )
    def test_json_that_is_an_answer_is_no_call(self, reader: Open, text: str) -> None:
        choice = answered(of_form(reader, "llama"), text)
        assert choice["message"]["content"] == text
        assert calls_of(choice) == []

    @pytest.mark.parametrize("form", ["qwen3-coder", "glm-4.5", "minimax-m2", "minimax-m3"])
    def test_a_text_that_closes_its_own_tag_is_not_cut(self, reader: Open, form: str) -> None:
        found = of_form(reader, form)
        for tag in ("</parameter>", "</arg_value>"):
            said: list[tuple[str, Any]] = [("weather", {"city": f"a{tag}b"})]
            choice = answered(found, written(found, said))
            assert calls_of(choice) in (said, [])
            content = choice["message"]["content"]
            assert content is None if calls_of(choice) else f"a{tag}b" in content

    @pytest.mark.parametrize(
        "text",
        [
            '<|python_tag|>{"name": "now", "parameters": {}}',
            '<|python_start|>{"type": "function", "name": "now", "parameters": {}}<|python_end|>',
        ],
    )
    def test_marks_of_programs_may_stand_around_calls_of_llama(
        self, reader: Open, text: str
    ) -> None:
        _, call = FORM_OF["llama"]
        marks = [f"<|python_{each}|>" for each in ("tag", "start", "end")]
        found = reader(OFFER + SHOW.replace("%s", CALLS + call), *marks)
        choice = answered(found, text)
        assert calls_of(choice) == [("now", {})]
        assert choice["message"]["content"] is None

    def test_there_is_a_template_here_for_every_form(self, tmp_path: Path) -> None:
        named = [
            next(form for form in FORMS if all(sign in text for sign in form.signs))
            for text in (SHOW.replace("%s", call) for _, call in FORM_OF.values())
        ]
        assert {id(form) for form in named} == {id(form) for form in FORMS}

    @settings(max_examples=60, deadline=None)
    @given(text=st.text(max_size=80), place=st.integers(0, 30))
    def test_whatever_is_written_is_read_or_left(self, text: str, place: int) -> None:
        from moebatch.rows import tool_calls

        offered = tools(TOOLS)
        assert offered is not None
        marks = [
            *("<tool_call>", "</tool_call>", "<function=a>", "<parameter=b>", "</parameter>"),
            *("[TOOL_CALLS]", "[ARGS]", '{"name": "now", "parameters": {}}', *DEEPSEEK, *KIMI),
            *("<|channel|>x to=functions.y<|message|>", '<invoke name="a">', "<arg_key>", "{}"),
            *("<|tool_call_start|>[f(a=1)]", "<|tool_call_start|>f(a={1: {2}})", "<tool_calls>[]"),
            *('<｜DSML｜invoke name="a"></｜DSML｜invoke>', '<|START_ACTION|>[{"tool_name": "a"}]'),
            '<invoke name="a"><b>1</b></invoke>'.replace("<", "]<]minimax[>[<"),
        ]
        for mark in marks:
            said = text[:place] + mark + text[place:]
            spelled = tool_calls.Spelled(said, bytes([1]) * len(said))
            for form in FORMS:
                found = tool_calls._read(form, spelled, offered)
                for call in found.calls if found else ():
                    assert isinstance(json.loads(call.arguments), dict) and call.name

    @pytest.mark.parametrize(
        ("form", "family", "prefix"),
        [
            ("hermes", "qwen3_moe", "<|im_start|>assistant\n"),
            ("qwen3-coder", "qwen3_5_moe", "<|im_start|>assistant\n"),
            ("gemma-4", "gemma4", "<|turn>model\n"),
        ],
    )
    @pytest.mark.parametrize(
        "said",
        [
            [("weather", {"city": "Oslo", "days": 2, "exact": True}), ("now", {})],
            [("weather", {"city": 'x {b:"c", d: 1} \\ é', "days": -3})],
        ],
    )
    def test_calls_are_those_that_transformers_reads(
        self, reader: Open, form: str, family: str, prefix: str, said: list[tuple[str, Any]]
    ) -> None:
        serving = pytest.importorskip("transformers.cli.serving.utils")
        parsing = pytest.importorskip("transformers.utils.chat_parsing")
        found = of_form(reader, form)
        text = "Let me see." + written(found, said)
        known = serving._RESPONSE_TEMPLATE_FALLBACKS
        (template,) = (known[names] for names in known if family in names)
        theirs = parsing.parse_response(text, template, prefix=prefix, tools=TOOLS)
        functions = [call["function"] for call in theirs["tool_calls"]]
        choice = answered(found, text)
        assert calls_of(choice) == [(each["name"], each["arguments"]) for each in functions]
        assert choice["message"]["content"] == theirs["content"]


class TestValues:
    @pytest.mark.parametrize(
        ("said", "arguments"),
        [
            (
                """[f(a='x', b=[1, -2.5, None], c={"d": True})]""",
                '{"a": "x", "b": [1, -2.5, null], ',
            ),
            ("f(a=true, b=null)", '{"a": true, "b": null}'),
            ('[{"name": "f", "arguments": {"a": false}}]', '{"a": false}'),
            ('{"name": "f", "arguments": {"a": 1}}', '{"a": 1}'),
            ("[]", None),
            ("[f(1)]", None),
            ("[f(**{})]", None),
            ("[f(a=g())]", None),
            ("[f(a={1})]", None),
            ("[f(a=1e999)]", None),
            ("[f(a=1", None),
            ("f(a=" + "[" * 5000, None),
        ],
    )
    def test_calls_of_lfm2_are_literals_of_python(
        self, reader: Open, said: str, arguments: str | None
    ) -> None:
        text = f"<|tool_call_start|>{said}<|tool_call_end|>"
        message = answered(of_form(reader, "lfm2"), text)["message"]
        if arguments is None:
            assert (message["content"], message.get("tool_calls")) == (text, None)
        else:
            (call,) = message["tool_calls"]
            assert call["function"]["arguments"].startswith(arguments)
            assert call["function"]["name"] == "f"

    @pytest.mark.parametrize(
        ("tag", "value"),
        [('string="true">5', "5"), ('string="false">5', 5), ('string="false">{"x": 1}', {"x": 1})],
    )
    def test_tags_of_deepseek_say_what_is_text(self, reader: Open, tag: str, value: Any) -> None:
        text = (
            f'<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" {tag}'
            "</｜DSML｜parameter></｜DSML｜invoke>"
        )
        said = answered(of_form(reader, "deepseek-v3.2"), text)
        assert calls_of(said) == [("weather", {"city": value})]

    def test_calls_of_hunyuan_are_a_list(self, reader: Open) -> None:
        text = '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>'
        assert calls_of(answered(of_form(reader, "minimax-m1"), text)) == [("now", {})]

    @pytest.mark.parametrize(
        ("name", "text", "value"),
        [
            ("city", "5", "5"),
            ("city", "null", "null"),
            ("days", "5", 5),
            ("days", "five", "five"),
            ("days", "NaN", "NaN"),
            ("exact", "True", True),
            ("exact", "false", False),
            ("at", '{"x": 1}', {"x": 1}),
            ("unit", "C", "C"),
            ("unit", "null", None),
            ("unknown", "5", "5"),
        ],
    )
    @pytest.mark.parametrize("form", ["qwen3-coder", "glm-4.5", "minimax-m2", "minimax-m3"])
    def test_text_between_tags_stands_for_what_the_schema_says(
        self, reader: Open, form: str, name: str, text: str, value: object
    ) -> None:
        found = of_form(reader, form)
        whole = written(found, [("weather", {"city": "Oslo"})])
        choice = answered(found, whole.replace("city", name).replace("Oslo", text))
        assert calls_of(choice) == [("weather", {name: value})]

    @pytest.mark.parametrize(
        ("element", "value"),
        [
            ("<tags><item>a</item><item>7</item></tags>", {"tags": ["a", "7"]}),
            ("<tags>\n<item>a</item>\n</tags>", {"tags": ["a"]}),
            ("<tags></tags><at></at><city></city>", {"tags": [], "at": {}, "city": ""}),
            ("<at><item>5</item></at>", {"at": {"item": "5"}}),
            ("<other><item>5</item></other>", {"other": ["5"]}),
            ("<legs><item><km>2.5</km></item></legs>", {"legs": [{"km": 2.5}]}),
            ("<$top>5</$top><año>1</año>", {"$top": 5, "año": "1"}),
            ('<legs>[{"km": 1}]</legs>', {"legs": [{"km": 1}]}),
        ],
    )
    def test_elements_within_elements_are_parts(
        self, reader: Open, element: str, value: object
    ) -> None:
        text = {"type": "string"}
        legs = {"type": "array", "items": {"properties": {"km": {"type": "number"}}}}
        tags = {"anyOf": [{"type": "array", "items": text}, {"type": "null"}]}
        known = {"city": text, "at": {"type": "object"}, "tags": tags, "legs": legs}
        schema = {"properties": {**known, "$top": {"type": "integer"}}}
        said = f'<invoke name="go">{element}</invoke>'.replace("<", "]<]minimax[>[<")
        choice = answered(of_form(reader, "minimax-m3"), said, tools=[function("go", schema)])
        assert calls_of(choice) == [("go", value)]

    @pytest.mark.parametrize(
        "element",
        [
            "<a>1</b>",
            "<a>1",
            "</a>",
            "<a><b>1</b>x</a>",
            "<a><b>1</b><b>2</b></a>",
            "x<a>1</a>",
            "<",
        ],
    )
    def test_elements_that_do_not_close_are_no_call(self, reader: Open, element: str) -> None:
        said = f'<invoke name="now">{element}</invoke>'.replace("<", "]<]minimax[>[<")
        choice = answered(of_form(reader, "minimax-m3"), said)
        assert calls_of(choice) == []
        assert choice["message"]["content"] == said

    def test_schemas_that_refer_to_themselves_have_an_end(self, reader: Open) -> None:
        again = {"anyOf": [{"$ref": "#/$defs/a"}] * 20}
        endless = {"properties": {"city": again}, "$defs": {"a": again}}
        found = of_form(reader, "qwen3-coder")
        whole = written(found, [("weather", {"city": "Oslo"})])
        choice = answered(found, whole, tools=[function("weather", endless)])
        assert calls_of(choice) == [("weather", {"city": "Oslo"})]

    @pytest.mark.parametrize("form", ["qwen3-coder", "glm-4.5", "minimax-m2", "minimax-m3"])
    def test_line_feeds_of_a_text_are_kept(self, reader: Open, form: str) -> None:
        found = of_form(reader, form)
        for city in ("\n  a\n\n  b\n", "a\n", "\na", "\n", ""):
            said: list[tuple[str, Any]] = [("weather", {"city": city})]
            assert calls_of(answered(found, written(found, said))) == said


class TestAnswers:
    def test_a_plain_row_has_calls_beside_its_text(self, reader: Open) -> None:
        found = of_form(reader, "hermes")
        said: list[tuple[str, Any]] = [("now", {})]
        response = answered(found, written(found, said), as_plain=True)
        assert response["text"] is None
        assert response["finish_reason"] == "tool_calls"
        (call,) = response["tool_calls"]
        assert call["function"] == {"name": "now", "arguments": "{}"}
        response = answered(found, "4", as_plain=True)
        assert (response["text"], response["tool_calls"]) == ("4", None)

    def test_ids_are_the_same_in_every_run_and_differ(self, reader: Open) -> None:
        found = of_form(reader, "hermes")
        text = written(found, [("now", {}), ("now", {})])
        first, again = (
            [call["id"] for call in answered(found, text)["message"]["tool_calls"]]
            for _ in range(2)
        )
        assert first == again
        assert len(set(first)) == 2
        assert all(len(each) == 9 and each.isalnum() for each in first), "as Mistral wants them"

    @pytest.mark.parametrize(
        ("form", "text", "identity"),
        [
            ("kimi-k2", None, "functions.now:0"),
            ("cohere", None, "0"),
            ("mistral", None, "123456789"),
            ("mistral-later", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}", "abcdefghi"),
        ],
    )
    def test_ids_of_the_model_are_kept(
        self, reader: Open, form: str, text: str | None, identity: str
    ) -> None:
        found = of_form(reader, form)
        choice = answered(found, text or written(found, [("now", {})]))
        assert [call["id"] for call in choice["message"]["tool_calls"]] == [identity]

    def test_one_call_alone_where_no_more_are_wanted(self, reader: Open) -> None:
        found = of_form(reader, "hermes")
        text = written(found, [("weather", {"city": "Oslo"}), ("now", {})])
        choice = answered(found, text, parallel_tool_calls=False)
        assert calls_of(choice) == [("weather", {"city": "Oslo"})]

    def test_a_stop_text_in_a_call_cuts_it_off(self, reader: Open) -> None:
        found = of_form(reader, "hermes")
        text = "So: " + written(found, [("weather", {"city": "Oslo"})]).strip()
        cut = text[: text.index("Oslo") + 4]
        choice = answered(found, cut, stop="Oslo")
        assert calls_of(choice) == []
        assert choice["message"]["content"] == cut.removesuffix("Oslo")
        choice = answered(found, text, stop="</tool_call>")
        assert calls_of(choice) == [("weather", {"city": "Oslo"})]
        assert choice["message"]["content"] == "So:"
        choice = answered(found, text + "now STOP", stop="STOP")
        assert choice["message"]["content"].endswith("now")

    def test_calls_that_are_only_thought_of_are_none(self, reader: Open) -> None:
        _, call = FORM_OF["hermes"]
        found = reader("{# <think> #}" + OFFER + SHOW.replace("%s", CALLS + call))
        text = written(found, [("now", {})])
        choice = answered(found, f"<think>a{text}</think>\n\nb{text}")
        assert calls_of(choice) == [("now", {})]
        assert choice["message"]["content"] == "b"
        assert choice["message"]["reasoning_content"] == f"a{text}"
        choice = answered(found, f"<think>a{text}", ended="length")
        assert calls_of(choice) == []
        choice = answered(found, f"<think>a{text}</think>b{text}", thought_in_text=True)
        assert calls_of(choice) == [("now", {})]
        assert choice["message"]["content"] == f"<think>a{text}</think>b"

    @pytest.mark.parametrize(
        "header",
        [
            "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
            "<|channel|>commentary to=functions.now json<|message|>",
            "<|channel|>analysis to=functions.now<|message|>",
            "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>",
            " to=functions.now<|channel|>commentary <|constrain|>json<|message|>",
        ],
    )
    @pytest.mark.parametrize("thought", ["", "<|channel|>analysis<|message|>so<|end|>"])
    def test_headers_of_gpt_oss_say_what_is_called(
        self, reader: Open, thought: str, header: str
    ) -> None:
        found = of_form(reader, "gpt-oss")
        if thought and header.startswith("<|channel|>"):
            header = "<|start|>assistant" + header
        if thought and header.startswith(" to"):
            header = "<|start|>assistant" + header
        choice = answered(found, thought + header + "{}<|call|>")
        assert calls_of(choice) == [("now", {})]
        assert choice["message"]["content"] is None
        assert choice["message"]["reasoning_content"] == ("so" if thought else None)

    @pytest.mark.parametrize("recipient", ["browser.search", "assistant"])
    def test_messages_of_gpt_oss_to_others_are_no_calls(self, reader: Open, recipient: str) -> None:
        found = of_form(reader, "gpt-oss")
        text = f"<|channel|>commentary to={recipient}<|message|>" + "{}"
        assert calls_of(answered(found, text)) == []

    def test_without_tools_nothing_is_a_call(self, reader: Open) -> None:
        found = of_form(reader, "hermes")
        text = written(found, [("now", {})])
        for row in ({"tools": []}, {"tool_choice": "none"}):
            choice = answered(found, text, **row)
            assert choice["message"]["content"] == text
            assert "tool_calls" not in choice["message"]
            assert choice["finish_reason"] == "stop"

    def test_a_job_may_leave_calls_in_the_text(self, reader: Open) -> None:
        found = of_form(reader, "hermes", output={"tool_calls": "in-text"})
        text = written(found, [("now", {})])
        choice = answered(found, text)
        assert choice["message"]["content"] == text
        assert choice["finish_reason"] == "stop"


class TestOffering:
    def test_tools_of_row_and_job_go_to_the_template(self, reader: Open) -> None:
        asked = {"tools": [NOW], "tool_choice": "auto"}
        found = of_form(reader, "hermes", sampling=asked)
        decode = found.tokenizer.decode
        for row, offered in (({}, [NOW]), ({"tools": [WEATHER]}, [WEATHER])):
            text = decode(ready(found, **row).request.prompt_tokens)
            assert json.loads(text.removesuffix("Is it cold?")) == offered
        for row in ({"tools": []}, {"tool_choice": "none"}):
            assert decode(ready(found, **row).request.prompt_tokens) == "Is it cold?"

    def test_a_template_that_leaves_tools_out_is_not_asked(self, reader: Open) -> None:
        found = reader("<tool_call>arguments{{ messages[0].content }}")
        error = refused(found, tools=TOOLS)
        assert (error.code, error.param) == ("unsupported_parameter", "tools")
        assert error.message == (
            "tools belongs to a use of tools, which the model's chat template leaves out"
        )
        ready(found, tools=TOOLS, tool_choice="none")

    def test_a_template_that_does_not_take_tools_is_named(self, reader: Open) -> None:
        no = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
        error = refused(reader(no + "<tool_call>arguments"), tools=TOOLS)
        assert error.param == "tools"
        assert error.message.endswith("which the model's chat template does not take: no tools")
        error = refused(reader("<tool_call>arguments{{ raise_exception('roles') }}"), tools=TOOLS)
        assert error.message == "messages do not fit the model's chat template: roles"

    def test_what_the_job_offers_in_vain_is_an_error_of_the_job(self, reader: Open) -> None:
        with pytest.raises(ConfigError, match=r"sampling\.tools: belongs to .* leaves out"):
            reader("<tool_call>arguments", sampling={"tools": TOOLS})
        with pytest.raises(ConfigError, match=r"sampling\.tools: .* in no form that is known"):
            reader(OFFER, sampling={"tools": TOOLS})

    def test_an_unknown_form_is_refused_unless_calls_stay_in_the_text(self, reader: Open) -> None:
        template = OFFER + "{{ messages[0].content }}"
        error = refused(reader(template), tools=TOOLS)
        assert (error.code, error.param) == ("unsupported_parameter", "tools")
        assert "output.tool_calls: in-text leaves them in the text" in error.message
        ready(reader(template), tools=TOOLS, tool_choice="required")
        ready(reader(template, output={"tool_calls": "in-text"}), tools=TOOLS)

    def test_tools_are_for_messages(self, reader: Open) -> None:
        found = of_form(reader, "hermes")
        error = refused(found, messages=None, prompt="Hi", tools=TOOLS)
        assert (error.code, error.param) == ("unsupported_parameter", "tools")
        assert error.message.startswith("tools are for messages, but the prompt goes to the model")
        ready(found, messages=None, prompt="Hi", tools=[], tool_choice="none")

    def test_an_answer_ends_where_a_call_does(self, reader: Open) -> None:
        found = of_form(reader, "gpt-oss")
        (end,) = tokens_of(found, "<|call|>")
        assert ready(found, tools=TOOLS).request.sampling.stop_token_ids == {end}
        assert ready(found).request.sampling.stop_token_ids == frozenset()

    def test_a_form_is_known_by_the_vocabulary_as_well(self, reader: Open) -> None:
        _, call = FORM_OF["gpt-oss"]
        found = reader(OFFER + SHOW.replace("%s", CALLS + call), *HARMONY[:-1])
        assert found.tokenizer.calls.form is None


class TestForced:
    @pytest.mark.parametrize("form", ["hermes", "gpt-oss", "glm-4.5"])
    def test_an_answer_that_must_call_is_read_as_it_is_held(self, reader: Open, form: str) -> None:
        found = of_form(reader, form)
        head = "<|channel|>final<|message|>" if form == "gpt-oss" else ""
        by_name = {"type": "function", "function": {"name": "weather"}}
        choice = answered(found, head + '{"city": "Oslo"}', tool_choice=by_name)
        assert calls_of(choice) == [("weather", {"city": "Oslo"})]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        text = (
            '[{"name": "now", "parameters": {}}, {"name": "weather", "parameters": {"city":"a"}}]'
        )
        choice = answered(found, head + text, tool_choice="required")
        assert calls_of(choice) == [("now", {}), ("weather", {"city": "a"})]
        choice = answered(found, head + text[:-9], tool_choice="required", ended="length")
        assert calls_of(choice) == []
        assert choice["message"]["content"] == text[:-9]

    def test_it_is_held_to_what_is_asked_for(self, reader: Open) -> None:
        found = of_form(reader, "hermes")
        by_name = {"type": "function", "function": {"name": "weather"}}
        for choice, text, fits in (
            ("required", '[{"name": "now", "parameters": {}}', True),
            ("required", '[{"name": "now", "parameters": {"a"', False),
            ("required", '[{"name": "then"', False),
            ("required", '[{"name": "weather", "parameters": {"city": "a"', True),
            ("required", '[{"name": "weather", "parameters": {"city": 5', False),
            ("required", '[{"name": "weather", "parameters": {"city": "a", "at": [', False),
            ("required", '[{"name": "weather", "parameters": {"city": "a", "at": {', True),
            ("required", "[]", False),
            ("required", '[{"name": "now", "parameters": {}}, {', True),
            (by_name, '{"city": "', True),
            (by_name, '{"days": "', False),
            (by_name, "[", False),
        ):
            request = ready(found, tools=TOOLS, tool_choice=choice).request
            assert request.sampling.grammar is not None
            matching = found.grammars.matching(request.sampling.grammar)
            matching.take(tokens_of(found, text))
            assert (not matching.fault) == fits, (choice, text)
        anything = [function("weather", {"properties": {}})]
        request = ready(found, tools=anything, tool_choice=by_name).request
        assert request.sampling.grammar is not None
        matching = found.grammars.matching(request.sampling.grammar)
        matching.take(tokens_of(found, "5"))
        assert matching.fault, "arguments are an object"
        request = ready(
            found, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        ).request
        assert request.sampling.grammar is not None
        matching = found.grammars.matching(request.sampling.grammar)
        matching.take(tokens_of(found, '[{"name": "now", "parameters": {}},'))
        assert matching.fault

    @pytest.mark.parametrize(
        ("row", "param", "message"),
        [
            ({"tool_choice": "required"}, "tool_choice", "is required, but there are no tools"),
            (
                {
                    "tools": TOOLS,
                    "tool_choice": {"type": "function", "function": {"name": "then"}},
                },
                "tool_choice",
                "names a function that must be one of weather, now, got 'then'",
            ),
            (
                {"tools": TOOLS, "response_format": {"type": "json_object"}},
                "tools",
                "may be called, but response_format leaves no room for a call; set tool_choice to "
                "none, or leave response_format out",
            ),
            (
                {
                    "tools": [function("f", {"type": "objekt"})],
                    "tool_choice": "required",
                },
                "tool_choice",
                "cannot be compiled: ",
            ),
        ],
    )
    def test_what_cannot_be_held_is_refused(
        self, reader: Open, row: dict[str, Any], param: str, message: str
    ) -> None:
        error = refused(of_form(reader, "hermes"), **row)
        assert (error.code, error.param) == ("invalid_value", param)
        assert error.message.startswith(f"{param} {message}")

    def test_an_answer_may_be_held_where_no_tool_is_offered(self, reader: Open) -> None:
        row = {"tools": TOOLS, "tool_choice": "none", "response_format": {"type": "json_object"}}
        assert ready(of_form(reader, "hermes"), **row).request.sampling.grammar is not None


class TestRepeats:
    def test_rows_that_differ_in_tools_are_different_rows(self, reader: Open) -> None:
        """Also where the template tells the model the same of both."""
        _, call = FORM_OF["qwen3-coder"]
        names = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        found = reader(names + SHOW.replace("%s", CALLS + call), sampling={"temperature": 0})
        rows = [
            ready(found, tools=[function("f", {"properties": {"a": {"type": kind}}})]).request
            for kind in ("string", "integer", "string")
        ]
        keys = [greedy_key(row) for row in rows]
        assert rows[0].prompt_tokens == rows[1].prompt_tokens
        assert keys[0] == keys[2] != keys[1]
        counter = RepeatCounter()
        assert [counter.add(row) for row in rows] == [False, False, True]
        assert Repeats(counter.repeated)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "must be a list of tools such as"),
        ("hammer", "must be a list of tools such as"),
        ({"type": "function"}, "must be a list of tools such as"),
        ([1], "[0] must be a mapping such as"),
        ([{"type": "web_search"}], "[0].type must be function, got 'web_search'"),
        ([{"type": "function"}], "[0].function must be a mapping such as"),
        ([NOW, function("")], "[1].function.name must be a text, got ''"),
        ([function("a", 5)], "[0].function.parameters must be a JSON schema, which"),
        ([function("a", "no")], "[0].function.parameters must be a JSON schema, which"),
        ([NOW, NOW], "holds 2 functions named 'now'; a name must be unique"),
        ([function("a", {"enum": {1}})], "must hold JSON, but "),
    ],
)
def test_what_is_no_tool_is_refused(value: object, message: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        tools(value)
    assert str(caught.value).startswith(message)


def test_tools_may_be_text_and_nulls_of_tables_are_not_said() -> None:
    expected = Tools(json.dumps([WEATHER, NOW], ensure_ascii=False))
    nulls = {**NOW, "more": None, "function": {"name": "now", "parameters": None, "strict": None}}
    as_text = function("weather", json.dumps(WEATHER["function"]["parameters"]))
    assert tools(TOOLS) == tools(json.dumps(TOOLS)) == tools([as_text, nulls]) == expected
    assert tools([]) is None


@pytest.mark.parametrize("value", ["any", 5, {"type": "function"}, {"type": "allowed_tools"}])
def test_what_is_no_choice_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"must be one of none, auto, required, \{"):
        tool_choice(value)


def test_schemas_refer_to_themselves_wherever_they_lie() -> None:
    place = {"type": "object", "properties": {"next": {"$ref": "#/$defs/place"}, "$ref": {}}}
    schema = {"properties": {"at": {"$ref": "#/$defs/place"}}, "$defs": {"place": place}}
    offered = tools([function("a", schema), function("b", {"properties": {"c": {"$ref": "#"}}})])
    assert offered is not None
    kept = json.loads(grammar_of_calls(offered, ToolChoice("required"), several=True).text)["$defs"]
    assert kept["0"]["properties"]["at"]["$ref"] == "#/$defs/0/$defs/place"
    inner = kept["0"]["$defs"]["place"]["properties"]
    assert inner == {"next": {"$ref": "#/$defs/0/$defs/place"}, "$ref": {}}
    assert kept["1"]["properties"]["c"]["$ref"] == "#/$defs/1"
