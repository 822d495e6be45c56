"""From a parsed row to tokens: templates, contexts, end tokens and damaged model folders."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moebatch.errors import CheckpointError, ConfigError
from moebatch.job.scan import scan
from moebatch.rows.prompts import RowReader, open_reader, read_generation_config
from moebatch.rows.row import FailedRow, RawRow, ReadyRow
from moebatch.rows.source import open_source
from moebatch.rows.tokenizer import Tokenizer
from moebatch.rows.tokenizer_files import load_tokenizer
from moebatch.spec.job import Job, load_job
from moebatch.spec.request import RowError
from tests.tiny import write_tokenizer

VOCABULARY = 320
Prepare = Callable[..., RowReader]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "mixtral", "eos_token_id": 2}')
    return folder


def job_of(model: Path, /, **sections: dict[str, Any]) -> Job:
    base = {"model": {"path": str(model)}, "input": {"path": "i"}, "output": {"path": "o"}}
    merged = {key: base.get(key, {}) | sections.get(key, {}) for key in base | sections}
    return Job.model_validate(merged)


@pytest.fixture(scope="module")
def ready(model: Path) -> Prepare:
    def make(max_positions: int = 64, **sections: dict[str, Any]) -> RowReader:
        job = job_of(model, **sections)
        return open_reader(job, vocab_size=VOCABULARY, max_positions=max_positions)

    return make


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model, vocab_size=VOCABULARY)


def request(reader: RowReader, content: dict[str, Any]) -> ReadyRow | FailedRow:
    raw = RawRow(index=0, line=1, content=json.dumps(content).encode())
    return reader.request(raw)


def good(reader: RowReader, content: dict[str, Any]) -> ReadyRow:
    row = request(reader, content)
    assert isinstance(row, ReadyRow), row
    return row


def bad(reader: RowReader, content: dict[str, Any]) -> RowError:
    row = request(reader, content)
    assert isinstance(row, FailedRow), row
    return row.error


class TestTokens:
    def test_text(self, ready: Prepare, tokenizer: Tokenizer) -> None:
        row = good(ready(), {"prompt": "The river", "id": "x", "max_tokens": 5})
        assert row.request.prompt_tokens == tokenizer.encode("The river")
        assert tokenizer.decode(row.request.prompt_tokens) == "The river"
        assert (row.request.custom_id, row.request.sampling.max_tokens) == ("x", 5)

    def test_chat_renders_the_template_once(self, ready: Prepare, tokenizer: Tokenizer) -> None:
        row = good(ready(), {"messages": [{"role": "user", "content": "Hi"}]})
        tokens = row.request.prompt_tokens
        special = tokenizer.token_bytes
        assert special(tokens[0]) == b"<|user|>"
        assert [special(token) for token in tokens[-2:]] == [b"</s>", b"<|assistant|>"]
        assert b"".join(map(special, tokens)) == b"<|user|>Hi</s><|assistant|>"

    def test_continued_message(self, ready: Prepare, tokenizer: Tokenizer) -> None:
        message = {"role": "assistant", "content": "The river"}
        row = good(ready(), {"messages": [message], "continue_final_message": True})
        text = b"".join(map(tokenizer.token_bytes, row.request.prompt_tokens))
        assert text == b"<|assistant|>The river"

    def test_token_ids(self, ready: Prepare) -> None:
        assert good(ready(), {"prompt": [5, 319]}).request.prompt_tokens == (5, 319)
        for token in (320, -1, 10**20):
            error = bad(ready(), {"prompt": [5, token]})
            assert error.message == (
                f"prompt holds the token id {token}, but the model has 320 tokens, 0 to 319"
            )

    def test_empty_prompts(self, ready: Prepare) -> None:
        for prompt in ("", []):
            assert bad(ready(), {"prompt": prompt}).message == (
                "prompt must hold at least one token, got none"
            )

    def test_bytes_of_tokens_join_to_the_text(self, tokenizer: Tokenizer) -> None:
        text = "Grüße \U0001f600 \x00 ok"
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
        assert tokenizer.token_bytes(10**6) == b""


class TestTemplates:
    def write(self, tmp_path: Path, template: str) -> dict[str, Any]:
        (tmp_path / "chat.jinja").write_text(template)
        return {"chat_template": str(tmp_path / "chat.jinja")}

    def text(self, reader: RowReader, **row: Any) -> str:
        line = {"messages": [{"role": "user", "content": "Hi"}]} | row
        tokens = good(reader, line).request.prompt_tokens
        return reader.tokenizer.decode(tokens)

    @pytest.mark.parametrize(
        "content",
        [
            "{{ 'user: ' + m.content[0]['text'] }}",
            "user: {% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
            "{% endfor %}",
            "user: {{ m.content }}",
            "user: {% if m.content is string %}{{ m.content }}{% else %}no{% endif %}",
        ],
        ids=["first", "each", "text", "either"],
    )
    def test_a_template_gets_texts_as_it_wants_them(
        self, ready: Prepare, tmp_path: Path, content: str
    ) -> None:
        """MiniMax-Text-01's and MiniMax-VL-01's want lists of parts."""
        each = f"{{% for m in messages %}}{content}{{% endfor %}}"
        assert self.text(ready(model=self.write(tmp_path, each))) == "user: Hi"

    def test_variables_of_job_and_row(self, ready: Prepare, tmp_path: Path) -> None:
        model = self.write(tmp_path, "{{ a }}-{{ b }}")
        kwargs = {"chat_template_kwargs": {"a": "job", "b": "job"}}
        reader = ready(model=model, sampling=kwargs)
        assert self.text(reader) == "job-job"
        assert self.text(reader, chat_template_kwargs={"b": "row"}) == "job-row"
        assert self.text(reader, chat_template_kwargs={"a": None, "b": "row"}) == "job-row"

    def test_variables_that_are_ours(self, ready: Prepare) -> None:
        line = {"messages": [{"role": "user", "content": "Hi"}]}
        for name in ("tokenize", "messages", "tools", "chat_template", "strftime_now"):
            error = bad(ready(), line | {"chat_template_kwargs": {name: 1}})
            assert error.message == f"chat_template_kwargs may not set {name}"
            with pytest.raises(
                ConfigError, match=rf"sampling\.chat_template_kwargs: .* set {name}"
            ):
                ready(sampling={"chat_template_kwargs": {name: 1}})

    def test_template_says_no(self, ready: Prepare, tmp_path: Path) -> None:
        model = self.write(tmp_path, "{{ raise_exception('roles must alternate') }}")
        error = bad(ready(model=model), {"messages": [{"role": "user", "content": "Hi"}]})
        assert (error.status, error.code, error.param) == (400, "invalid_value", "messages")
        assert error.message == (
            "messages do not fit the model's chat template: roles must alternate"
        )

    def test_template_fails(self, ready: Prepare, tmp_path: Path) -> None:
        model = self.write(tmp_path, "{{ messages[5].content }}")
        error = bad(ready(model=model), {"messages": [{"role": "user", "content": "Hi"}]})
        assert "do not fit the model's chat template" in error.message

    def test_syntax_error(self, ready: Prepare, tmp_path: Path) -> None:
        model = self.write(tmp_path, "\n{% for %}")
        told = r"chat\.jinja: model\.chat_template: is broken in line 2: "
        with pytest.raises(ConfigError, match=told):
            ready(model=model)

    def test_a_byte_order_mark_is_no_part_of_a_template(
        self, ready: Prepare, tmp_path: Path
    ) -> None:
        model = self.write(tmp_path, "\ufeffDear {{ messages[0].content }}")
        assert self.text(ready(model=model)) == "Dear Hi"

    def test_template_file_is_missing(self, ready: Prepare, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"model\.chat_template: not read: No such file"):
            ready(model={"chat_template": str(tmp_path / "gone.jinja")})

    @pytest.mark.parametrize(
        ("asked", "date"),
        [
            ("strftime_now('%d %b %Y')", "03 Feb 2001"),
            ("strftime_now(wanted)", "2001-02-03"),
            ("strftime_now(format='%Y' ~ '%-H%%')", "20010%"),
        ],
    )
    def test_date_is_that_of_the_run(
        self, model: Path, tmp_path: Path, asked: str, date: str
    ) -> None:
        template = self.write(tmp_path, " {% set wanted = '%Y-%m-%d' %}{{ " + asked + " }}")
        reader = open_reader(
            job_of(model, model=template),
            vocab_size=VOCABULARY,
            max_positions=64,
            today=datetime.date(2001, 2, 3),
        )
        assert self.text(reader) == date

    def test_no_template(self, model: Path, tmp_path: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((model / name).read_bytes())
        tokenizer = load_tokenizer(tmp_path, vocab_size=VOCABULARY)
        assert not tokenizer.has_chat_template
        with pytest.raises(CheckpointError) as caught:
            tokenizer.require_chat_template("line 3")
        assert str(caught.value) == (
            f"{tmp_path}: the tokenizer has no chat template, but line 3 has messages; "
            "set model.chat_template to a jinja file, or use rows with prompt"
        )

    def test_no_template_is_found_by_the_scan(self, model: Path, tmp_path: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((model / name).read_bytes())
        rows = tmp_path / "in.jsonl"
        rows.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
        reader = open_reader(job_of(tmp_path), vocab_size=VOCABULARY, max_positions=64)
        for read in (reader.request, reader.parse):
            found = scan(open_source(rows), read)
            assert (found.num_bad_rows, found.faults) == (0, ())
            assert found.first_chat is not None
            assert found.first_chat.place == "line 2"


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
WITH_TOOLS = [
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
]
EACH = "{% for m in messages %}%s;{% endfor %}"


class TestTools:
    def template(self, tmp_path: Path, each: str) -> dict[str, Any]:
        (tmp_path / "chat.jinja").write_text(EACH.replace("%s", each))
        return {"model": {"chat_template": str(tmp_path / "chat.jinja")}}

    @pytest.mark.parametrize(
        "arguments",
        ["call.arguments.a", "call.arguments | tojson", "'' + call.arguments"],
        ids=["entry", "object", "text"],
    )
    def test_calls_are_rendered_with_arguments_as_the_template_wants_them(
        self, ready: Prepare, tmp_path: Path, arguments: str
    ) -> None:
        each = (
            "{{ m.role + ' ' + m.content }}{% for c in m.tool_calls or [] %}"
            "{% set call = c.function %}{{ call.name }}({{ " + arguments + " }}){% endfor %}"
        )
        reader = ready(**self.template(tmp_path, each))
        tokens = good(reader, {"messages": WITH_TOOLS}).request.prompt_tokens
        value = "2" if arguments.endswith(".a") else '{"a": 2}'
        expected = f"user 2 + 3?;assistant add({value});tool 5;"
        assert reader.tokenizer.decode(tokens) == expected

    def test_a_template_that_leaves_calls_out_is_not_asked(self, ready: Prepare) -> None:
        error = bad(ready(), {"messages": WITH_TOOLS})
        assert (error.code, error.param) == ("unsupported_parameter", "messages[1].tool_calls")
        assert error.message == (
            "messages[1].tool_calls belongs to a use of tools, which the model's chat template "
            "leaves out"
        )

    @pytest.mark.parametrize("messages", [WITH_TOOLS, [WITH_TOOLS[0], WITH_TOOLS[2]]])
    def test_a_template_that_leaves_answers_of_tools_out_is_not_asked(
        self, ready: Prepare, tmp_path: Path, messages: list[dict[str, Any]]
    ) -> None:
        each = "{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.content }}{{ m.tool_calls }}"
        error = bad(ready(**self.template(tmp_path, each)), {"messages": messages})
        assert error.param == f"messages[{len(messages) - 1}].role"
        assert error.message.endswith("which the model's chat template leaves out")

    def test_a_role_that_the_template_leaves_out_is_named(
        self, ready: Prepare, tmp_path: Path
    ) -> None:
        """Its instructions would be followed by nobody."""
        messages = [{"role": role, "content": role[0]} for role in ("developer", "user")]
        each = "{% if m.role not in ['system', 'user'] %}{% continue %}{% endif %}{{ m.content }}"
        error = bad(ready(**self.template(tmp_path, each)), {"messages": messages})
        assert (error.code, error.param) == ("unsupported_parameter", "messages[0].role")
        assert error.message == (
            "messages[0].role is 'developer', which the model's chat template leaves out"
        )
        good(ready(), {"messages": messages})

    def test_a_template_that_does_not_take_tools_is_named_before_its_own_words(
        self, ready: Prepare, tmp_path: Path
    ) -> None:
        each = "{% if m.role == 'tool' %}{{ raise_exception('roles!') }}{% endif %}{{ m.content }}"
        error = bad(ready(**self.template(tmp_path, each)), {"messages": WITH_TOOLS[2:]})
        assert (error.code, error.param) == ("unsupported_parameter", "messages[0].role")
        assert error.message == (
            "messages[0].role belongs to a use of tools, which the model's chat template does not "
            "take: roles!"
        )


class TestContext:
    def test_the_limit_of_a_row_is_cut_as_that_of_the_job(self, ready: Prepare) -> None:
        row = good(ready(max_positions=10), {"prompt": [5] * 8, "max_tokens": 3})
        assert row.request.sampling.max_tokens == 2

    def test_default_limit_is_cut(self, ready: Prepare) -> None:
        reader = ready(max_positions=10, sampling={"max_tokens": 50})
        assert good(reader, {"prompt": [5] * 8}).request.sampling.max_tokens == 2
        assert good(reader, {"prompt": [5] * 9}).request.sampling.max_tokens == 1
        error = bad(reader, {"prompt": [5] * 10})
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert "needs 11: 10 of the prompt and 1 of the answer at least" in error.message

    def test_cut_below_min_tokens(self, ready: Prepare) -> None:
        assert good(ready(max_positions=10), {"prompt": [5] * 8, "min_tokens": 2})
        error = bad(ready(max_positions=10), {"prompt": [5] * 8, "min_tokens": 3})
        assert error.code == "context_length_exceeded"

    def test_a_number_too_long_to_be_written_is_more_than_the_context_has(
        self, ready: Prepare
    ) -> None:
        """Python writes no number of more than 4,300 digits."""
        reader, huge = ready(max_positions=10), 10**4299
        for name in ("max_tokens", "max_completion_tokens"):
            assert good(reader, {"prompt": [5] * 8, name: huge}).request.sampling.max_tokens == 2
        error = bad(reader, {"prompt": [5] * 8, "min_tokens": huge, "max_tokens": huge})
        assert error.code == "context_length_exceeded"

    def test_min_tokens_that_hold_back_every_token_are_refused(self, ready: Prepare) -> None:
        """None would be left to choose, which looks like a broken model."""
        reader = ready(sampling={"stop_token_ids": [token for token in range(320) if token != 2]})
        for row in ({"min_tokens": 1}, {"min_tokens": 2, "ignore_eos": True}):
            error = bad(reader, {"prompt": [5], **row})
            assert (error.code, error.param) == ("invalid_value", "min_tokens")
            assert "every token of the model ends an answer" in error.message
            raw = RawRow(index=0, line=1, content=json.dumps({"prompt": [5], **row}).encode())
            assert isinstance(reader.parse(raw), FailedRow)
        good(reader, {"prompt": [5], "min_tokens": 0})
        good(reader, {"prompt": [5], "min_tokens": 1, "stop_token_ids": [2, 3]})


class TestModelFolder:
    def copy(self, model: Path, tmp_path: Path, **files: Any) -> Path:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((model / name).read_bytes())
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / f"{name}.json").write_text(text)
        return tmp_path

    def load(self, folder: Path) -> RowReader:
        return open_reader(job_of(folder), vocab_size=VOCABULARY, max_positions=64)

    @pytest.mark.parametrize(
        ("generation", "config", "expected"),
        [
            ({}, {"eos_token_id": 2}, {2}),
            ({"eos_token_id": [2, 5]}, {"eos_token_id": 7}, {2, 5, 7}),
            ({"eos_token_id": None}, {"text_config": {"eos_token_id": [9]}}, {9}),
            ({}, {}, {2}),
        ],
    )
    def test_end_tokens(
        self, model: Path, tmp_path: Path, generation: Any, config: Any, expected: set[int]
    ) -> None:
        config = {"model_type": "mixtral"} | config
        folder = self.copy(model, tmp_path, generation_config=generation, config=config)
        reader = self.load(folder)
        assert reader.end_tokens == expected
        assert reader.warnings == ()

    @pytest.mark.parametrize(
        ("generation", "configured", "expected"),
        [
            ({"decoder_start_token_id": 7}, 3, 7),
            ({"decoder_start_token_id": None}, 3, 3),
            ({}, 0, 0),
            ({"decoder_start_token_id": 7}, None, None),
        ],
    )
    def test_start_token(
        self,
        model: Path,
        tmp_path: Path,
        generation: Any,
        configured: int | None,
        expected: int | None,
    ) -> None:
        """What generation_config.json says counts, of models that encode prompts alone."""
        folder = self.copy(model, tmp_path, generation_config=generation)
        reader = open_reader(
            job_of(folder), vocab_size=VOCABULARY, max_positions=64, start_token=configured
        )
        assert reader.start_token == expected

    @pytest.mark.parametrize(
        ("generation", "configured", "message"),
        [
            (
                {"decoder_start_token_id": [7]},
                3,
                r"generation_config\.json: decoder_start_token_id",
            ),
            ({}, 320, r"/config\.json: decoder_start_token_id must be .* 0 to 319, got 320"),
        ],
    )
    def test_start_tokens_that_the_model_does_not_have(
        self, model: Path, tmp_path: Path, generation: Any, configured: int, message: str
    ) -> None:
        folder = self.copy(model, tmp_path, generation_config=generation)
        with pytest.raises(CheckpointError, match=message):
            read_generation_config(folder, vocab_size=VOCABULARY, start_token=configured)

    def test_no_end_token_warns(self, model: Path, tmp_path: Path) -> None:
        folder = self.copy(model, tmp_path, config={"model_type": "mixtral"})
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings.pop("eos_token", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        reader = self.load(folder)
        assert reader.end_tokens == frozenset()
        assert "every answer will run to max_tokens" in reader.warnings[0]

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"generation_config": {"eos_token_id": 320}}, "from 0 to 319, got 320"),
            ({"generation_config": {"eos_token_id": "2"}}, "from 0 to 319, got '2'"),
            ({"generation_config": "{"}, "generation_config.json: is not JSON"),
            ({"config": []}, "config.json: expected an object, got []"),
        ],
    )
    def test_damaged(self, model: Path, tmp_path: Path, files: Any, message: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            self.load(self.copy(model, tmp_path, **files))
        assert message in str(caught.value)

    def test_a_link_that_leads_nowhere(self, model: Path, tmp_path: Path) -> None:
        folder = self.copy(model, tmp_path)
        (folder / "generation_config.json").unlink(missing_ok=True)
        (folder / "generation_config.json").symlink_to("../../blobs/0123")
        with pytest.raises(CheckpointError, match=r"generation_config.json: cannot be read: No "):
            self.load(folder)

    def test_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no such folder; check model\.path"):
            load_tokenizer(tmp_path / "gone", vocab_size=VOCABULARY)

    def test_tokenizer_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
        with pytest.raises(CheckpointError, match=r"no tokenizer is there; put tokenizer\.json"):
            load_tokenizer(tmp_path, vocab_size=VOCABULARY)

    def test_code_of_the_folder_is_not_run(self, model: Path, tmp_path: Path) -> None:
        folder = self.copy(model, tmp_path)
        (folder / "evil.py").write_text("raise SystemExit('run')")
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        try:
            load_tokenizer(folder, vocab_size=VOCABULARY)
        except CheckpointError as error:
            assert "cannot be loaded" in str(error)

    def test_tokenizer_of_a_larger_model(self, model: Path) -> None:
        with pytest.raises(CheckpointError, match="the model has only 300 tokens; they do not"):
            load_tokenizer(model, vocab_size=300)


def test_sampling_that_no_row_can_have_is_a_fault_of_the_job_file(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: {{path: {model}}}\ninput: {{path: i}}\noutput: {{path: o}}\n"
        "sampling: {stop_token_ids: [999]}\n"
    )
    with pytest.raises(ConfigError) as caught:
        open_reader(load_job(path), vocab_size=VOCABULARY, max_positions=64)
    assert str(caught.value) == (
        f"{path}: sampling.stop_token_ids: holds the token id 999, "
        "but the model has 320 tokens, 0 to 319"
    )


def test_requests_keep_the_order_and_are_lazy(ready: Prepare, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{\n\n{"prompt": "b"}\n')
    rows = ready().requests(open_source(path))
    assert isinstance(next(rows), ReadyRow)
    kinds = [(row.row.index, row.row.line, type(row)) for row in rows]
    assert kinds == [(1, 2, FailedRow), (2, 4, ReadyRow)]


def test_parse_checks_parameters_without_encoding(ready: Prepare) -> None:
    raw = RawRow(index=0, line=1, content=b'{"prompt": "a", "n": true}')
    failed = ready().parse(raw)
    assert isinstance(failed, FailedRow)
    assert failed.error.param == "n"
