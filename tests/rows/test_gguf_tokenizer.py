"""Tokenizers out of GGUF files: the tokens of the tokenizer.json that the file was made of."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from moebatch.errors import CheckpointError, ConfigError
from moebatch.rows.row import Chat
from moebatch.rows.tokenizer import Tokenizer
from moebatch.rows.tokenizer_files import load_tokenizer
from tests.gguf_models import add_tokenizer, write_gguf
from tests.job.test_resume import GREEDY, run, write
from tests.tiny import write_tokenizer

TEXTS = (
    "It's a  test:\n\n\tfor (i=0; i<650841823; i++) {}  \u00fcber\u4e2d\u6587 THE end.\n",
    "u\u0308ber and \u00fcber, decomposed and composed",
    "<s>one</s><|user|> two  \r\n\r\n three zebra\nzebra HTMLElement's",
    "",
)
PROMPTS: list[dict[str, object]] = [
    {"custom_id": f"{i}", "prompt": TEXTS[i % 3] * (1 + i)} for i in range(5)
]
CHAT = Chat(messages=({"role": "user", "content": "Say 1234567, please"},))


def cutting(folder: Path, cuts: str) -> Path:
    """Gives a byte-level tokenizer one of the ways to cut text that files name."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    regex = GGUF_PRE_TOKENIZER_SPLITS[cuts]
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    by_bytes = {**content["pre_tokenizer"], "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [cut, by_bytes]}
    content["normalizer"] = {"type": "NFC"} if cuts == "qwen2" else None
    content["post_processor"] = None
    content["model"]["ignore_merges"] = cuts != "qwen2"
    content["model"]["vocab"]["zebra"] = len(content["model"]["vocab"])  # which no merges make
    file.write_text(json.dumps(content))
    return folder


@pytest.fixture
def original(tmp_path: Path) -> Path:
    (tmp_path / "original").mkdir()
    write_tokenizer(tmp_path / "original")
    return tmp_path / "original"


@pytest.fixture
def file(original: Path, tmp_path: Path) -> Callable[..., Path]:
    def make(cuts: str = "qwen2", change: Callable[[Any], None] = lambda writer: None) -> Path:
        if cuts in GGUF_PRE_TOKENIZER_SPLITS:
            cutting(original, cuts)
        folder = tmp_path / "gguf"
        folder.mkdir()
        writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3moe")
        add_tokenizer(writer, original, cuts)
        change(writer)
        writer.add_tensor("token_embd.weight", np.zeros((320, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return folder / "model.gguf"

    return make


def model_of(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A plain one whose tokenizer cuts text as Qwen2's does."""
    plain = tiny_checkpoint("qwen3_moe", vocab_size=321, moe_intermediate_size=32)
    return cutting(Path(shutil.copytree(plain, tmp_path / "plain")), "qwen2")


def load(path: Path) -> Tokenizer:
    """Of a folder, or of a file in one."""
    folder, gguf = (path.parent, path) if path.is_file() else (path, None)
    return load_tokenizer(folder, vocab_size=400, gguf=gguf)


@pytest.mark.parametrize("cuts", ["qwen2", "gpt-4o", "llama-bpe", "lfm2"])
def test_tokens_are_those_of_the_tokenizer_that_it_was_made_of(
    cuts: str, original: Path, file: Callable[..., Path]
) -> None:
    path = file(cuts)
    theirs, ours = load(original), load(path)
    for text in TEXTS:
        tokens = theirs.encode(text)
        assert ours.encode(text) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens)
        assert [*map(ours.token_bytes, tokens)] == [*map(theirs.token_bytes, tokens)]
    assert ours.encode_chat(CHAT, {}) == theirs.encode_chat(CHAT, {})
    assert ours.end_tokens == theirs.end_tokens == {2}


@pytest.mark.parametrize("cuts", ["qwen2", "llama-bpe"])
def test_added_tokens_are_whole_whatever_their_letters(
    cuts: str, original: Path, file: Callable[..., Path]
) -> None:
    content = json.loads((original / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["\u0120ox"] = len(vocab)  # whose bytes are " ox"
    added = {" ox": False, "two  ": False, "\u65e5\u672c": False, "<\uff5cend\uff5c>": True}
    for number, (token, special) in enumerate(
        added.items(), start=len(vocab) + 1
    ):  # behind "zebra"
        like = content["added_tokens"][0]
        content["added_tokens"].append({**like, "id": number, "content": token, "special": special})
    (original / "tokenizer.json").write_text(json.dumps(content))
    path = file(cuts)
    theirs, ours = load(original), load(path)
    for text in ("an ox, two  of them", "a\u65e5\u672ca <\uff5cend\uff5c> b", *TEXTS):
        tokens = theirs.encode(text)
        assert ours.encode(text) == tokens
        assert ours.decode(tokens) == theirs.decode(tokens)
        assert [*map(ours.token_bytes, tokens)] == [*map(theirs.token_bytes, tokens)]


@pytest.mark.parametrize("cuts", ["llama-bpe", "lfm2"])
def test_texts_of_llama_3_and_lfm2_begin_with_a_token_of_their_own_unless_the_file_says_no(
    cuts: str, original: Path, file: Callable[..., Path]
) -> None:
    def says_nothing(writer: Any) -> None:
        del writer.kv_data[0]["tokenizer.ggml.add_bos_token"]

    path = file(cuts, says_nothing)
    theirs, ours = load(original), load(path)
    assert ours.encode("a zebra") == (1, *theirs.encode("a zebra"))
    assert ours.encode_chat(CHAT, {}) == theirs.encode_chat(CHAT, {})


def test_turns_may_end_with_tokens_of_their_own(file: Callable[..., Path]) -> None:
    assert load(file(change=lambda writer: writer.add_eot_token_id(5))).end_tokens == {2, 5}


@pytest.mark.parametrize("cuts", ["of another model", "llama4"])
def test_a_tokenizer_beside_the_file_is_the_one_that_counts(
    cuts: str, original: Path, file: Callable[..., Path]
) -> None:
    path = file(cuts)
    with pytest.raises(CheckpointError, match=rf"\('{cuts}'\) is not known; put tok"):
        load(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path.parent / name).write_bytes((original / name).read_bytes())
    assert load(path).encode(TEXTS[0]) == load(original).encode(TEXTS[0])


def test_a_damaged_file_is_refused(file: Callable[..., Path]) -> None:
    path = file()
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        load(path)


def test_a_job_does_not_go_on_with_another_tokenizer(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model_of(tiny_checkpoint, tmp_path)
    path = write_gguf(folder, tmp_path / "alone", lambda name: "F32", cuts="qwen2") / "model.gguf"
    job = write(tmp_path / "job", path, PROMPTS, **GREEDY)
    run(job, limit=2)
    assert path.read_bytes().count(b"zebra") == 1
    path.write_bytes(path.read_bytes().replace(b"zebra", b"zebru"))
    with pytest.raises(ConfigError, match=r"belongs to another job: .*tokenizer was"):
        run(job)


def test_a_job_needs_no_more_than_the_file(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model_of(tiny_checkpoint, tmp_path)
    alone = write_gguf(folder, tmp_path / "alone", lambda name: "F32", cuts="qwen2")
    beside = write_gguf(folder, tmp_path / "beside", lambda name: "F32")
    named = write_gguf(folder, tmp_path / "named.gguf", lambda name: "F32", cuts="qwen2")
    several = write_gguf(folder, tmp_path / "several", lambda name: "F32", cuts="qwen2", split=9)
    given = []
    for number, model in enumerate((alone, alone / "model.gguf", named, several, beside)):
        job = write(tmp_path / f"job-{number}", model, PROMPTS, **GREEDY)
        run(job)
        given.append((job.parent / "out.jsonl").read_bytes())
    assert len({*given}) == 1
