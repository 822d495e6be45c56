"""The job file: what it means, and every sentence it may be refused with."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from moebatch.errors import ConfigError, Fault
from moebatch.spec.job import Job, load_job

MINIMAL = "model: {path: m}\ninput: {path: in.jsonl}\noutput: {path: out.jsonl}\n"


def load(tmp_path: Path, text: str | bytes) -> Job:
    path = tmp_path / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_job(path)


def faults(tmp_path: Path, text: str | bytes) -> list[Fault]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert all(fault.file == str(tmp_path / "job.yaml") for fault in caught.value.faults)
    return list(caught.value.faults)


def fault(tmp_path: Path, text: str | bytes) -> tuple[int | None, str | None, str]:
    found = faults(tmp_path, text)
    assert len(found) == 1, found
    return found[0].line, found[0].where, found[0].message


class TestMeaning:
    def test_minimal_job_has_defaults_and_paths_beside_the_file(self, tmp_path: Path) -> None:
        job = load(tmp_path, MINIMAL)
        assert job.model.path == tmp_path / "m"
        assert job.input.path == tmp_path / "in.jsonl"
        assert job.output.path == tmp_path / "out.jsonl"
        assert (job.model.dtype, job.output.format, job.input.on_bad_row) == (
            "auto",
            "auto",
            "record",
        )
        assert job.sampling.defaults() == {}
        assert job.sampling.seed == 0
        assert job.resources.dram is None

    def test_all_values(self, tmp_path: Path) -> None:
        job = load(
            tmp_path,
            """
model: {path: /m, dtype: bfloat16, name: mixtral, chat_template: t.jinja}
input: {path: i.parquet, on_bad_row: fail}
output: {path: o.jsonl.gz, format: plain, errors: e.jsonl, column: answer}
sampling: {max_tokens: 9, temperature: 1e-1, top_k: -1, stop: x, logit_bias: {12: 3}, seed: -5,
           stop_token_ids: [3, 4], chat_template_kwargs: {enable_thinking: false}}
resources: {hardware: auto, vram: 800MiB, dram: 12GiB, disk: 5000000, threads: 3}
""",
        )
        assert job.model.path == Path("/m")
        assert job.model.chat_template == tmp_path / "t.jinja"
        assert job.output.errors == tmp_path / "e.jsonl"
        assert job.sampling.defaults() == {
            "max_tokens": 9,
            "temperature": 0.1,
            "top_k": 0,
            "stop": ("x",),
            "logit_bias": {12: 3.0},
            "stop_token_ids": frozenset({3, 4}),
        }
        assert job.sampling.seed == -5
        assert job.sampling.chat_template_kwargs == {"enable_thinking": False}
        assert job.resources.vram == 800 * 2**20
        assert job.resources.threads == 3

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("auto", "auto"),
            ("t4", "t4"),
            ("mine.yaml", "{folder}/mine.yaml"),
            ("../mine", "{folder}/../mine"),
            ("/etc/mine.yml", "/etc/mine.yml"),
        ],
    )
    def test_hardware_is_auto_or_a_name_or_a_path_beside_the_file(
        self, tmp_path: Path, text: str, expected: str
    ) -> None:
        job = load(tmp_path, f"{MINIMAL}resources: {{hardware: {text}, dram: 1GiB}}\n")
        assert job.resources.hardware == expected.format(folder=tmp_path)
        assert job.resources.dram == 2**30

    def test_home_is_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/someone")
        assert load(tmp_path, MINIMAL.replace("path: m", "path: ~/m")).model.path == Path(
            "/home/someone/m"
        )

    def test_section_with_all_lines_commented_out(self, tmp_path: Path) -> None:
        assert load(tmp_path, MINIMAL + "sampling:\n  # top_p: 1\n").sampling.defaults() == {}

    def test_byte_order_mark_and_aliases(self, tmp_path: Path) -> None:
        text = MINIMAL.replace("path: m", "path: &a m").replace("path: in.jsonl", "path: *a")
        assert load(tmp_path, b"\xef\xbb\xbf" + text.encode()).input.path == tmp_path / "m"

    def test_example_of_the_repository(self) -> None:
        example = Path(__file__).parents[2] / "jobs" / "example.yaml"
        job = load_job(example)
        assert job.sampling.max_tokens == 256
        assert job.resources.dram == 12 * 2**30
        text = example.read_text()
        for name, field in Job.model_fields.items():
            assert field.annotation is not None
            for key in field.annotation.model_fields:
                assert f"{key}:" in text, f"{name}.{key}"

    def test_example_with_every_key_uncommented(self, tmp_path: Path) -> None:
        example = Path(__file__).parents[2] / "jobs" / "example.yaml"
        lines = (re.sub("^  # ", "  ", line) for line in example.read_text().splitlines())
        text = "\n".join(lines).replace("temperature: 0 ", "temperature: 0.5 ")
        assert load(tmp_path, text).sampling.logit_bias == {50256: -100.0}

    def test_nothing_heavy_is_imported(self) -> None:
        code = (
            "import sys; import moebatch.spec.job; "
            "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'datasets')))"
        )
        root = Path(__file__).parents[2]
        assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


class TestFile:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no such file; give the path of a job file"):
            load_job(tmp_path / "nowhere.yaml")

    def test_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="is a folder; give the path of a job file"):
            load_job(tmp_path)

    @pytest.mark.parametrize(
        ("text", "line", "message"),
        [
            (b"", None, "the job file is empty"),
            (b"# nothing\n\n", None, "the job file is empty"),
            (b"- a\n", 1, "expected a mapping such as `model: …`, found a list"),
            (b"\nhello\n", 2, "expected a mapping such as `model: …`, found a single value"),
            (b"a: 1\nb: \xff\n", 2, "is not UTF-8 text; save it as UTF-8"),
            (b"a: 1\nb: [1\n", 3, "wrong YAML syntax: expected ',' or ']', but got '<stream end>'"),
            (
                b"a: 1\n\tb: 2\n",
                2,
                "wrong YAML syntax: found character '\\t' that cannot start any token; write",
            ),
            (b"a: 1\nb: \x07\n", 2, "holds a character that YAML does not allow: '\\x07'"),
            (b"a: *nobody\n", 1, "wrong YAML syntax: found undefined alias 'nobody'"),
            (
                b"a: 1\n---\nb: 2\n",
                2,
                "wrong YAML syntax: expected a single document in the stream but found another",
            ),
            (b"a: &x [*x]\n", 1, "more than 20000 values or 32 levels once aliases are used"),
            (b"a: " + b"[" * 5000, None, "nested deeper than 32 levels"),
            (b"x" * (2**20 + 1), None, "more than 1048576 bytes: this is no job file"),
        ],
    )
    def test_unreadable(self, tmp_path: Path, text: bytes, line: int | None, message: str) -> None:
        found_line, _, found = fault(tmp_path, text)
        assert found.startswith(message)
        assert found_line == line

    def test_alias_bomb(self, tmp_path: Path) -> None:
        names = "abcdefghijklmno"
        lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
        for before, name in pairwise(names):
            lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
        _, _, message = fault(tmp_path, "\n".join(lines))
        assert message == "more than 20000 values or 32 levels once aliases are used"

    def test_an_endless_number_is_a_fault(self, tmp_path: Path) -> None:
        found = faults(tmp_path, f"{MINIMAL}sampling: {{seed: {'9' * 5000}}}\n")
        assert found[0].message == "cannot be read as int"

    @pytest.mark.parametrize("written", ["010", "-0_17", "12:30", "1:1:1.5", ":".join("1" * 10**5)])
    def test_what_is_a_number_of_another_base_is_text(self, tmp_path: Path, written: str) -> None:
        _, where, message = fault(tmp_path, f"{MINIMAL}sampling: {{seed: {written}}}\n")
        assert where == "sampling.seed" and f"got '{written[:20]}" in message
        job = load(tmp_path, f"{MINIMAL}sampling: {{stop: {written}}}\n")
        assert job.sampling.stop == (written,)

    @pytest.mark.parametrize("written", ["1.5e0", ".15e+1", "15E-1", "1_5.e-1", "+1.5"])
    def test_numbers_may_have_points_and_exponents(self, tmp_path: Path, written: str) -> None:
        job = load(tmp_path, f"{MINIMAL}sampling: {{temperature: {written}}}\n")
        assert job.sampling.temperature == 1.5

    def test_a_word_that_is_no_text_to_yaml_is_named(self, tmp_path: Path) -> None:
        text = "sampling: {ignore_eos: off, structured_outputs: {choice: [x, no]}}"
        (found,) = faults(tmp_path, MINIMAL + text)
        assert found.message.endswith(
            "got ['x', False]; YAML takes no for true or false unless it is in quotes: \"no\""
        )
        (found,) = faults(tmp_path, f"{MINIMAL}sampling: {{stop: true}}")
        assert found.message.endswith("got true")

    @pytest.mark.parametrize("key", ["model", "input", "output"])
    @pytest.mark.parametrize("path", ["x" * 256, "x/" * 2048, "é" * 128])
    def test_a_path_that_cannot_be(self, tmp_path: Path, key: str, path: str) -> None:
        text = re.sub(f"{key}: {{path: [^}}]*", f"{key}: {{path: {path}", MINIMAL)
        _, where, message = fault(tmp_path, text)
        assert where == f"{key}.path"
        assert message.startswith(f"is longer than a path can be: '{path[:20]}")

    @pytest.mark.parametrize(
        "line, where",
        [
            ('sampling: {stop: ["a\\ud800"]}', "sampling.stop[0]"),
            ('sampling: {chat_template_kwargs: {"\\udfff": 1}}', "sampling.chat_template_kwargs"),
            ('experts: {"\\ud800": 1}', "experts"),
        ],
    )
    def test_halves_of_surrogate_pairs(self, tmp_path: Path, line: str, where: str) -> None:
        message = "holds half of a surrogate pair, which is no character"
        assert fault(tmp_path, MINIMAL + line) == (4, where, message)

    def test_pairs_of_surrogates_are_characters_as_json_has_them(self, tmp_path: Path) -> None:
        told = {"path": "😀.jsonl", "prompt": "{😀} 𝄞?"}
        content = {"model": {"path": "m"}, "input": told, "output": {"path": "o.jsonl"}}
        job = load(tmp_path, json.dumps(content))
        assert (job.input.path, job.input.prompt) == (tmp_path / "😀.jsonl", "{😀} 𝄞?")

    def test_python_objects(self, tmp_path: Path) -> None:
        text = "model: !!python/object/apply:os.system [ls]\n"
        message = "the tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed here"
        assert fault(tmp_path, text) == (1, "model", f"{message}; write plain YAML")

    def test_key_that_is_no_word(self, tmp_path: Path) -> None:
        assert fault(tmp_path, MINIMAL + "? [a]\n: b\n") == (4, None, "a key must be plain text")

    def test_number_that_is_none(self, tmp_path: Path) -> None:
        text = MINIMAL + "sampling:\n  max_tokens: !!int abc\n"
        found = [(f.line, f.where, f.message) for f in faults(tmp_path, text)]
        assert found == [(5, "sampling.max_tokens", "cannot be read as int")]


UNITS = "(units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)"
SIZE = f"must be auto or a size such as 12GiB, 1.5GB or 800MiB {UNITS}, got "
WHOLE = "must be a whole number "
WRONG = [
    ("sampling", "max_tokens: true", WHOLE + "of at least 1, got true"),
    ("sampling", "max_tokens: 0", WHOLE + "of at least 1, got 0"),
    ("sampling", "max_tokens: 1.0", WHOLE + "of at least 1, got 1.0"),
    ("sampling", "max_tokens: '5'", WHOLE + "of at least 1, got '5'"),
    ("sampling", "max_tokens: [5]", WHOLE + "of at least 1, got [5]"),
    ("sampling", "temperature: 2.1", "must be a number from 0 to 2, got 2.1"),
    ("sampling", "temperature: -1", "must be a number from 0 to 2, got -1"),
    ("sampling", "temperature: .nan", "must be a number from 0 to 2, got nan"),
    ("sampling", "temperature: .inf", "must be a number from 0 to 2, got inf"),
    ("sampling", "temperature: 1e999", "must be a number from 0 to 2, got inf"),
    ("sampling", "temperature: hot", "must be a number from 0 to 2, got 'hot'"),
    ("sampling", "top_p: 0", "must be a number above 0 and at most 1, got 0"),
    ("sampling", "top_k: -2", WHOLE + "of at least 1, or 0 or -1 for off, got -2"),
    ("sampling", "min_p: 1.5", "must be a number from 0 to 1, got 1.5"),
    ("sampling", "n: 0", WHOLE + "from 1 to 1024, got 0"),
    ("sampling", "seed: abc", WHOLE + f"from {-(2**63)} to {2**63 - 1}, got 'abc'"),
    ("sampling", "stop: ''", "must not hold an empty text, which would end every answer at once"),
    ("sampling", "stop: [1]", "must be a text or a list of texts, got [1]"),
    ("sampling", "stop_token_ids: 7", "must be a list of token ids, got 7"),
    (
        "sampling",
        "stop_token_ids: [-1]",
        "must hold token ids, which are whole numbers from 0 up, got -1",
    ),
    ("sampling", "ignore_eos: 1", "must be true or false, got 1"),
    ("sampling", "min_tokens: -1", WHOLE + "of at least 0, got -1"),
    ("sampling", "logprobs: 21", WHOLE + "from 0 to 20, got 21"),
    ("sampling", "presence_penalty: 3", "must be a number from -2 to 2, got 3"),
    ("sampling", "frequency_penalty: x", "must be a number from -2 to 2, got 'x'"),
    (
        "sampling",
        "repetition_penalty: 0",
        "must be a number above 0 and at most 1,000,000, 1 being off, got 0",
    ),
    ("sampling", "logit_bias: [1]", "must be a mapping of token ids to numbers, got [1]"),
    ("sampling", "logit_bias: {1: 101}", "of token 1 must be a number from -100 to 100, got 101"),
    (
        "sampling",
        "logit_bias: {a: 1}",
        "must hold token ids, which are whole numbers from 0 up, got 'a'",
    ),
    (
        "sampling",
        "chat_template_kwargs: 1",
        "must be a mapping such as {enable_thinking: false}, got 1",
    ),
    ("sampling", "temprature: 1", "unknown key; did you mean sampling.temperature?"),
    ("sampling", "dram: 1GiB", "unknown key; did you mean resources.dram?"),
    ("resources", "ram: 1GiB", "unknown key; did you mean resources.vram or resources.dram?"),
    (
        "resources",
        "gpus: 1",
        "unknown key; allowed are hardware, device, vram, dram, disk, threads, kv_cache, "
        "state_cache",
    ),
    ("resources", "dram: 12GiBB", SIZE + "'12GiBB'"),
    ("resources", "dram: 0", SIZE + "0"),
    ("resources", "vram: -1GiB", SIZE + "'-1GiB'"),
    ("resources", "disk: " + "9" * 400, SIZE + "9" * 60 + "…"),
    ("resources", "dram: 1.5", SIZE + "1.5"),
    (
        "resources",
        "dram: 8",
        "8 has no unit, which makes it 8 bytes; did you mean 8GiB? As bytes: 8B",
    ),
    ("resources", "dram: true", SIZE + "true"),
    ("resources", "threads: 0", "must be auto or a whole number from 1 to 4096, got 0"),
    (
        "resources",
        "hardware: 3090",
        "must be auto, which measures this machine, or the name or path of a hardware profile, "
        "got 3090",
    ),
    (
        "resources",
        "hardware: ' '",
        "must be auto, which measures this machine, or the name or path of a hardware profile, "
        "got ' '",
    ),
]


@pytest.mark.parametrize(("section", "line", "message"), WRONG)
def test_wrong_value(tmp_path: Path, section: str, line: str, message: str) -> None:
    key = line.partition(":")[0]
    found = fault(tmp_path, f"{MINIMAL}{section}:\n  {line}\n")
    assert found == (5, f"{section}.{key}", message)


@pytest.mark.parametrize(
    ("old", "new", "line", "where", "message"),
    [
        ("path: m", "path: 5", 1, "model.path", "must be a path, got 5"),
        ("path: m", "path: ''", 1, "model.path", "must be a path, got ''"),
        ("path: m", "path: null", 1, "model.path", "must be a path, got null"),
        (
            "path: m",
            "path: m, dtype: int8",
            1,
            "model.dtype",
            "must be one of auto, float32, bfloat16, float16, got 'int8'",
        ),
        ("path: m", "path: m, name: 7", 1, "model.name", "must be a text, got 7"),
        (
            "path: in.jsonl",
            "path: i, on_bad_row: skip",
            2,
            "input.on_bad_row",
            "must be one of record, fail, got 'skip'",
        ),
        (
            "path: in.jsonl",
            "path: i, prompt: 'Q: {question'",
            2,
            "input.prompt",
            "has '{' where a column such as {question} could be; a brace that is meant as such "
            "is written twice",
        ),
        (
            "path: in.jsonl",
            "path: i, prompt: '{{question}}'",
            2,
            "input.prompt",
            "names no column, got '{{question}}'; a column stands in single braces, such as "
            "{question}",
        ),
        ("path: in.jsonl", "path: i, chat: 1", 2, "input.chat", "must be true or false, got 1"),
        (
            "path: out.jsonl",
            "path: o, format: csv",
            3,
            "output.format",
            "must be one of auto, openai, plain, got 'csv'",
        ),
        ("path: m", "dtype: auto", 1, "model.path", "is missing and has no default"),
        ("output: {path: out.jsonl}", "", None, "output", "is missing; add it with path"),
        (
            "{path: in.jsonl}",
            "in.jsonl",
            2,
            "input",
            "must be a mapping with keys of its own (path, prompt, chat, on_bad_row), "
            "got 'in.jsonl'",
        ),
        (
            "output:",
            "max_tokens: 5\noutput:",
            3,
            "max_tokens",
            "unknown key; did you mean sampling.max_tokens?",
        ),
        ("output:", "inputs: 5\noutput:", 3, "inputs", "unknown key; did you mean input?"),
        ("output:", "input: 5\noutput:", 3, "input", "given twice, first in line 2"),
    ],
)
def test_wrong_elsewhere(
    tmp_path: Path, old: str, new: str, line: int | None, where: str, message: str
) -> None:
    assert fault(tmp_path, MINIMAL.replace(old, new)) == (line, where, message)


def test_contradictions(tmp_path: Path) -> None:
    text = MINIMAL + "sampling:\n  n: 2\n  temperature: 0\n  min_tokens: 9\n  max_tokens: 5\n"
    assert [(f.line, f.where, f.message) for f in faults(tmp_path, text)] == [
        (
            5,
            "sampling.n",
            "is 2, but temperature 0 always takes the likeliest token, so all answers would be "
            "the same; set n to 1 or temperature above 0",
        ),
        (7, "sampling.min_tokens", "is 9, more than max_tokens, which is 5"),
    ]


def test_all_faults_at_once_in_order(tmp_path: Path) -> None:
    text = "model: {pth: m}\ninput: {path: i}\nsampling:\n  n: 0\n  n: 1\nresources: {dram: x}\n"
    assert [(f.line, f.where) for f in faults(tmp_path, text)] == [
        (None, "output"),
        (1, "model.path"),
        (1, "model.pth"),
        (4, "sampling.n"),
        (5, "sampling.n"),
        (6, "resources.dram"),
    ]


def test_job_is_frozen(tmp_path: Path) -> None:
    job = load(tmp_path, MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        job.model.dtype = "float32"  # type: ignore[misc]
