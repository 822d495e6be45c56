"""Tokenizers and chat templates that are damaged, or were made to do harm."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tokenizers

from moebatch.errors import CheckpointError, ExitCode, StorageError
from moebatch.rows import tokenizer as module
from moebatch.rows.guards import TimeLimit, TooLong
from moebatch.rows.refused import RowRefused
from moebatch.rows.row import Chat
from moebatch.rows.tokenizer import Tokenizer
from moebatch.rows.tokenizer_files import load_tokenizer
from tests.patience import PATIENCE_S
from tests.reliability.faulty_os import FaultyOs
from tests.tiny import write_tokenizer

Make = Callable[..., Path]
HELLO = Chat(messages=({"role": "user", "content": "Hello"},))
GPT2 = '{"tokenizer_class": "GPT2Tokenizer"}'
FAILING_FILE = Path("/proc/self/mem")
"""Reading it from its beginning fails as on a broken disk."""
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A folder with a good tokenizer, parts of which are replaced."""

    def make(template: str | None = None, **parts: Any) -> Path:
        write_tokenizer(tmp_path)
        file = tmp_path / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | parts))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        return tmp_path

    return make


def words(kind: str) -> dict[str, Any]:
    """A model of two words that names an unknown token which it does not have."""
    model = {"type": kind, "vocab": {"Hello": 0, "you": 1}, "unk_token": "[UNK]"}
    if kind == "WordPiece":
        model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    nothing = {"added_tokens": [], "post_processor": None, "decoder": None}
    return {"model": model, "pre_tokenizer": {"type": "Whitespace"}, **nothing}


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(folder, vocab_size=320)


@pytest.mark.parametrize("kind", ["WordLevel", "WordPiece"])
def test_words_that_a_tokenizer_breaks_down_over_are_its_fault(make: Make, kind: str) -> None:
    tokenizer = load(make(**words(kind), template="{{ messages[0].content }}"))
    assert tokenizer.encode("you Hello") == (1, 0)
    for encode in (
        lambda: tokenizer.encode("some zebra"),
        lambda: tokenizer.encode_chat(Chat(messages=({"role": "u", "content": "some zebra"},)), {}),
    ):
        with pytest.raises(CheckpointError, match=r"Missing \[UNK\] token") as caught:
            encode()
        assert "the tokenizer cannot encode 'some zebra'" in str(caught.value)
        assert caught.value.exit_code == ExitCode.CHECKPOINT


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "nobody", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
    ids=["while it is loaded", "while it encodes"],
)
def test_a_tokenizer_that_panics_is_refused_without_its_backtrace(
    make: Make, parts: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        load(make(**parts))
    assert capfd.readouterr() == ("", "")
    os.write(1, b"heard")  # afterwards
    os.write(2, b"again")
    assert capfd.readouterr() == ("heard", "again")


def test_a_pointer_of_git_lfs_is_no_tokenizer(make: Make) -> None:
    folder = make()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "tokenizer.json").write_text(pointer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is a pointer of Git LFS"):
        load(folder)


def test_texts_are_cut_as_the_file_says_whatever_the_class_of_transformers_does(make: Make) -> None:
    """GPT2Tokenizer of transformers 5 takes words and merges of a file, and its own rules: DBRX."""
    folder = make()
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    alone = {"type": "Split", "pattern": {"Regex": r"\d"}, "behavior": "Isolated", "invert": False}
    by_bytes = {**content["pre_tokenizer"], "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [alone, by_bytes]}
    content["model"]["merges"].insert(0, ["6", "5"])
    content["model"]["vocab"]["65"] = len(content["model"]["vocab"])
    file.write_text(json.dumps(content))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "GPT2Tokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"model_type": "dbrx"}')
    text = "the 65, and\n\n the 65"
    expected = tokenizers.Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    tokenizer = load_tokenizer(folder, vocab_size=400)
    assert tokenizer.encode(text) == tuple(expected)
    assert tokenizer.has_chat_template and tokenizer.end_tokens == {2}


def test_spaces_are_put_where_the_file_says_also_behind_special_tokens(make: Make) -> None:
    """LlamaTokenizer of transformers 5 puts one before a text alone; the file of the first Mixtral,
    before all that stands between special tokens."""
    letters = ["<pad>", "<s>", "</s>", "<unk>", "\u2581", *"Helo[]"]
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    space, strip = {"String": "\u2581"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    folder = make(
        model={
            "type": "BPE",
            "vocab": {letter: place for place, letter in enumerate(letters + every_byte)},
            "merges": [],
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        pre_tokenizer=None,
        post_processor=None,
        decoder={
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": space, "content": " "}, strip],
        },
        template="<s>[{{ messages[0].content }}]</s>[",
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(folder)
    assert tokenizer.encode(" Hello")[-7:] == (4, 4, 5, 6, 7, 7, 8)
    expected = [letters.index(each) for each in ("<s>", *"\u2581[Hello]", "</s>", *"\u2581[")]
    assert tokenizer.encode_chat(HELLO, {}) == tuple(expected)


def test_a_tokenizer_that_other_libraries_would_read_is_refused_with_what_to_do(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*; put a tokenizer\.json of it"):
        load(tmp_path)


def test_a_file_put_beside_a_tokenizer_that_is_a_program_is_read(make: Make) -> None:
    folder = make()
    expected = load(folder).encode("The river finds 1 of the lamps.")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    programs = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    config |= {"tokenizer_class": "TikTokenTokenizer", "auto_map": programs}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit(1)")
    (folder / "tiktoken.model").write_text("dGhl 0")
    assert load(folder).encode("The river finds 1 of the lamps.") == expected


def test_a_tokenizer_that_is_a_program_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("dGhl 0")
    config = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"which is not run; put a tokenizer\.json of it"):
        load(tmp_path)


def test_tokens_put_around_every_text_belong_to_the_model(make: Make) -> None:
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    around = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [700], "tokens": ["<s>"]}},
    }
    with pytest.raises(CheckpointError, match="token ids up to 700, but the model has only 320"):
        load(make(post_processor=around))


def test_the_configuration_alone_is_no_tokenizer(make: Make) -> None:
    folder = make()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer is there; put tokenizer\.json"):
        load(folder)


def test_a_file_that_is_no_json_is_named(make: Make) -> None:
    folder = make()
    (folder / "tokenizer_config.json").write_text('{"chat_template": ')
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: is not JSON: .* column"):
        load(folder)


def test_a_file_that_cannot_be_read_is_named(make: Make) -> None:
    folder = make(model=None)
    (folder / "added_tokens.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"added_tokens.json: cannot be read: No such file"):
        load(folder)


def test_a_disk_that_fails_is_no_damage(make: Make) -> None:
    folder = make()
    counting = FaultyOs([folder], -1, "fails")
    with counting.in_force():
        load(folder)
    assert counting.num_operations
    for number in range(1, counting.num_operations + 1):
        with pytest.raises(StorageError), FaultyOs([folder], number, "fails").in_force():
            load(folder)


@pytest.mark.skipif(not FAILING_FILE.exists(), reason="the system has no such file")
@pytest.mark.parametrize(
    ("others", "name"),
    [
        ({"vocab.json": '{"a": 0}', "tokenizer_config.json": GPT2}, "merges.txt"),
        ({"tokenizer_config.json": "{}"}, "tokenizer.model"),
    ],
    ids=["merges", "sentencepiece"],
)
def test_a_disk_that_fails_under_a_library_is_no_damage(
    tmp_path: Path, others: dict[str, str], name: str
) -> None:
    for other, text in others.items():
        (tmp_path / other).write_text(text)
    (tmp_path / name).symlink_to(FAILING_FILE)
    with pytest.raises(StorageError, match="Input/output error"):
        load(tmp_path)


def test_a_disk_that_fails_once_under_a_library_is_no_damage(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise Exception("Input/output error (os error 5)")  # as libraries in Rust do

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        load(make())


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_link_that_leads_nowhere_is_not_taken_for_no_file(make: Make, name: str) -> None:
    folder = make()
    (folder / name).unlink()
    (folder / "readme.txt").symlink_to("nowhere")
    load(folder)
    (folder / name).symlink_to("../../blobs/0123")
    with pytest.raises(CheckpointError, match=f"{name}: cannot be read: No such file"):
        load(folder)


def test_what_the_library_prints_of_a_file_is_not_on_the_screen(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    token = {"id": 0, "content": "<pad>", "special": True, "lstrip": False, "rstrip": False}
    token |= {"single_word": False, "normalized": False, "\x1b[2J": True}
    load(make(added_tokens=[token]))
    assert capfd.readouterr() == ("", "")


class Panicking:
    """A tokenizer that breaks down whatever it is asked."""

    eos_token_id = None
    added_tokens_decoder: ClassVar[dict[int, str]] = {}

    def apply_chat_template(self) -> str:
        return ""

    def decode(self, tokens: list[int], **_: object) -> str:
        raise type("PanicException", (BaseException,), {})("index out of bounds")

    def convert_ids_to_tokens(self, token: int) -> str:
        raise KeyError(token)


def test_breaking_down_over_tokens_is_the_fault_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(Panicking(), folder=tmp_path, template=None)
    with pytest.raises(CheckpointError, match=r"cannot decode \[1, 2\]: index out of bounds"):
        tokenizer.decode([1, 2])
    with pytest.raises(CheckpointError, match="cannot decode 7: 7"):
        tokenizer.token_bytes(7)


def test_ctrl_c_is_nobodys_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Panicking, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Tokenizer(Panicking(), folder=tmp_path, template=None).decode([1])


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt", "tokenizer.model"])
def test_a_file_larger_than_any_vocabulary_is_refused_unread(make: Make, name: str) -> None:
    folder = make()
    with (folder / name).open("wb") as file:
        file.truncate(200_000_000)
    with pytest.raises(CheckpointError, match=rf"{name}: 191 MiB, at most 64.0 MiB are read"):
        load(folder)


def test_a_pipe_is_not_waited_for(make: Make) -> None:
    os.mkfifo(make() / "merges.txt")
    with pytest.raises(CheckpointError, match=r"merges\.txt: is no regular file"):
        load(make())


def test_a_template_that_never_ends_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_RENDERING_S", 0.2)
    with pytest.raises(CheckpointError, match="template is broken: it has not ended within 0 s"):
        load(make(ENDLESS))
    tokenizer = load(make("{% if messages|length > 1 %}" + ENDLESS + "{% endif %}x"))
    assert tokenizer.encode_chat(HELLO, {})
    with pytest.raises(RowRefused, match="it has not ended within 0 s"):
        tokenizer.encode_chat(Chat(messages=HELLO.messages * 2), {})


def test_a_template_that_makes_gigabytes_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_PROMPT", 1000)
    tokenizer = load(make("{{ messages[0].content * 3 }}"))
    with pytest.raises(RowRefused, match="it makes more than 1000 characters of them"):
        tokenizer.encode_chat(Chat(messages=({"role": "u", "content": "x" * 400},)), {})


def test_a_text_far_beyond_what_is_enough_is_not_encoded_to_its_end(make: Make) -> None:
    tokenizer = load(make())
    text = "The river finds " * 10_000
    whole = tokenizer.encode(text)
    begun = tokenizer.encode(text, enough=10)
    assert 10 < len(begun) < 1000
    assert begun == whole[: len(begun)]
    assert tokenizer.encode(text, enough=len(whole)) == whole
    # Few tokens may be many characters: then all of it is looked at.
    long = load(make(normalizer={"type": "Replace", "pattern": {"String": "  "}, "content": ""}))
    assert long.encode(" " * 100_000 + "river", enough=10) == long.encode("river")


def test_what_is_traced_goes_on_after_a_time_limit() -> None:
    """In a process of its own, which would never end."""
    traced = """
import sys
from moebatch.rows.guards import TimeLimit, TooLong

def answer():
    return 42

try:
    with TimeLimit(0.05).held():
        while True:
            pass
except TooLong:
    sys.settrace(lambda *event: None)
    print(answer())
"""
    command = [sys.executable, "-c", traced]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == "42\n"


def test_a_time_limit_ends_what_is_late_and_nothing_else() -> None:
    limit, seen = TimeLimit(0.1), []

    def endless() -> None:
        while True:
            seen.append(1)
            seen.clear()

    def ended() -> bool:
        with pytest.raises(TooLong), limit.held():
            endless()
        for _ in range(1000):  # what comes behind it is left alone
            with limit.held():
                pass
        return True

    assert ended()
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(ended())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 3
