"""What is fed with bytes that were not checked, and what must hold whatever they are."""

import datetime
import gzip
import io
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moebatch.checkpoint.header import read_header
from moebatch.checkpoint.index import INDEX_NAME, Checkpoint
from moebatch.errors import MoebatchError
from moebatch.folder.claim import read_claim
from moebatch.folder.run_folder import RunFolder
from moebatch.job.scan import scan
from moebatch.job.status_file import read_status
from moebatch.journal.finished import Finished
from moebatch.journal.record import Record, encode
from moebatch.quoting import harmless
from moebatch.rows.parse import RowRules, parse_row
from moebatch.rows.prompts import read_generation_config
from moebatch.rows.refused import RowRefused
from moebatch.rows.row import Chat, FailedRow, ReadyRow
from moebatch.rows.source import open_source
from moebatch.rows.tokenizer_files import load_tokenizer
from moebatch.spec.files.json_file import read_object
from moebatch.spec.job import load_job
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.shape_reader import read_shape
from moebatch.spec.policy.file import load_policy

Feed = Callable[[Path, bytes], None]
_LONGEST_MESSAGE = 100_000


@dataclass(frozen=True, kw_only=True)
class Target:
    """A reader of files."""

    name: str
    seeds: tuple[bytes, ...]
    """What it is made for."""
    feed: Feed
    """Reads the bytes in a folder that is empty at first. Raises MoebatchError at most."""

    def hit(self, folder: Path, data: bytes) -> bool:
        """Feeds it; whether it took the bytes. Raises whatever a user must never see."""
        try:
            self.feed(folder, data)
        except MoebatchError as error:
            message = str(error)
            assert message, "an error without a message"
            assert "Traceback" not in message
            assert message == harmless(message), "a message that commands the terminal"
            assert len(message) < _LONGEST_MESSAGE, "a message too long to read"
            return False
        return True


def _job(folder: Path, data: bytes) -> None:
    (folder / "job.yaml").write_bytes(data)
    load_job(folder / "job.yaml")


def _profile(folder: Path, data: bytes) -> None:
    (folder / "hardware.yaml").write_bytes(data)
    load_profile(str(folder / "hardware.yaml"))


def _policy(folder: Path, data: bytes) -> None:
    (folder / "policy.yaml").write_bytes(data)
    load_policy(folder / "policy.yaml")


def _rows(folder: Path, data: bytes) -> None:
    """Between two good rows, which have to come through unless the file as a whole is refused."""
    first, last = b'{"custom_id": "first", "prompt": "a"}', b'{"custom_id": "last", "prompt": "b"}'
    path = folder / "in.jsonl"
    path.write_bytes(first + b"\n" + data + b"\n" + last + b"\n")
    source = open_source(path)
    parsed = [parse_row(raw, RowRules()) for raw in source]
    errors = [item.error.message for item in parsed if isinstance(item, FailedRow)]
    assert all(error == harmless(error) and len(error) < _LONGEST_MESSAGE for error in errors)
    names = [item.row.custom_id for item in parsed if not hasattr(item, "error")]
    assert "first" in names, "a good row is lost"
    assert "last" in names, "a good row is lost"
    summary = scan(source, lambda raw: parse_row(raw, RowRules()))
    assert summary.num_rows == len(parsed)
    summary.require_usable()
    assert not any(isinstance(item, ReadyRow) for item in parsed)


def _compressed(folder: Path, data: bytes) -> None:
    (folder / "in.jsonl.gz").write_bytes(b"\x1f\x8b" + data)
    scan(open_source(folder / "in.jsonl.gz"), lambda raw: parse_row(raw, RowRules()))


def _header(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(64))
    read_header(folder / "model.safetensors")


def _raw_tensors(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    read_header(folder / "model.safetensors")


def _index(folder: Path, data: bytes) -> None:
    (folder / INDEX_NAME).write_bytes(data)
    file = struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(64)
    (folder / "model-1.safetensors").write_bytes(file)
    Checkpoint.open(folder)


def _config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    read_shape(read_object(folder / "config.json"), "config.json")


def _generation(folder: Path, data: bytes) -> None:
    (folder / "generation_config.json").write_bytes(data)
    read_generation_config(folder, vocab_size=100)


def _tokenizer(folder: Path, data: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(data)
    (folder / "tokenizer_config.json").write_bytes(_TOKENIZER_CONFIG)
    tokenizer = load_tokenizer(folder, vocab_size=100)
    tokenizer.decode(tokenizer.encode("Hello zebra"))
    assert all(isinstance(tokenizer.token_bytes(token), bytes) for token in range(100))


def _template(folder: Path, data: bytes) -> None:
    """Rows may be refused by it, with a message like any other."""
    (folder / "tokenizer.json").write_bytes(_TOKENIZER)
    (folder / "tokenizer_config.json").write_bytes(_TOKENIZER_CONFIG)
    (folder / "chat_template.jinja").write_bytes(data)
    tokenizer = load_tokenizer(folder, vocab_size=100)
    try:
        tokenizer.encode_chat(Chat(messages=({"role": "user", "content": "Hello"},)), {})
    except RowRefused as refused:
        message = refused.error.message
        assert message == harmless(message)
        assert len(message) < _LONGEST_MESSAGE


def _parquet(folder: Path, data: bytes) -> None:
    (folder / "in.parquet").write_bytes(data)
    scan(open_source(folder / "in.parquet"), lambda raw: parse_row(raw, RowRules()))


def _table() -> bytes:
    import pyarrow
    import pyarrow.parquet

    file = io.BytesIO()
    columns = {
        "prompt": ["a", "b"],
        "max_tokens": [1, 2],
        "when": [datetime.datetime(2026, 1, 1)] * 2,
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def _journal(folder: Path, data: bytes) -> None:
    """Behind good records, and in a journal of its own; good ones stay as they were."""
    good = [Record(bytes([n]) * 16, n, "done", b'{"row":%d}' % n) for n in range(3)]
    whole = b"".join(map(encode, good))
    (folder / "1.jsonl").write_bytes(whole + data)
    (folder / "2.jsonl").write_bytes(data)
    with Finished(folder) as finished:
        for record in good:
            found = finished.find(record.key)
            assert found is not None, "a good record is lost"
            assert finished.line(found.place) == record.line


def _run_folder(folder: Path, data: bytes) -> None:
    run = RunFolder(folder / "out.jsonl")
    run.path.mkdir(exist_ok=True)
    (run.path / "status-1-of-1.json").write_bytes(data)
    (run.path / "lock").write_bytes(data)
    run.manifest.write_bytes(data)
    for path in run.statuses:
        read_status(path)
    read_claim(run)


_JOB = b"""model: {path: model, dtype: auto}
input: {path: in.jsonl, on_bad_row: record}
output: {path: out.jsonl, format: auto, column: response}
sampling: {temperature: 0.7, max_tokens: 10, stop: ["a"], seed: 1}
resources: {dram: 3GiB, threads: 2, hardware: t4, device: cpu}
"""
_PROFILE = b"""name: x
source: a data sheet
levels:
  dram:
    capacity: {achieved: 16GiB, source: a}
    bandwidth: {achieved: 20GB/s}
    gemm: {float32: {achieved: {1: 1GFLOP/s, 16: 0.06TFLOP/s}}}
    attention_bandwidth: {achieved: 2.5GB/s}
  disk: {capacity: {achieved: 500GB}}
links: {disk->dram: {achieved: 1GB/s}, dram->disk: {achieved: 0.5GB/s}}
"""
_POLICY = b"""title: x
model: mixtral-8x7b
workload: {prompt_tokens: 418, new_tokens: 32}
policy: {batch_size: 96, micro_batch_size: 8, attention_on_gpu: true, ffn_on_gpu: true,
  weights: {vram: 0.1, dram: 0.9}, kv_cache: {dram: 1}, schedule: cgopipe, batching: static}
"""
_ROWS = (
    b'{"custom_id": "x", "prompt": "text", "max_tokens": 5, "temperature": 0.5, "stop": ["a"]}',
    b'{"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": '
    b'[{"role": "user", "content": "hi"}], "logprobs": true, "top_logprobs": 3, "n": 2}}',
    b'{"prompt": [1, 2, 3], "sampling_params": {"top_k": 4, "seed": 3}}',
)
_HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "b": {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]},
    }
).encode()
_INDEX = json.dumps(
    {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
).encode()
_CONFIG = json.dumps(
    {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
).encode()
_GENERATION = b'{"eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.9, "do_sample": true}'
_TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 0,
                "content": "<s>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "<s>",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {"<s>": 0, "Hello": 1, "z": 2, "##ebra": 3},
        },
    }
).encode()
_TOKENIZER_CONFIG = b'{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}'
_TEMPLATES = (
    b"{% for message in messages %}<s>{{ message['role'] }}: {{ message.content | trim }}"
    b"{% endfor %}{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}",
    b"{%- set x = namespace(a=1) %}{% macro f(y) %}{{ y|tojson }}{% endmacro %}{{ f(messages) }}"
    b"{{ raise_exception('no') if x.a > 2 }}{{ strftime_now('%Y') }}",
)
_RECORD = encode(Record(b"\7" * 16, 9, "part", b'{"row":1}'))
_MANIFEST = json.dumps(
    {"job": {"model": "m"}, "settled": {"date": "2026-11-21", "num_shards": 3}}
).encode()
_STATUS = json.dumps(
    {"shard": "1/1", "state": "running", "rows": 3, "done": 1, "failed": 0, "updated": 1.0}
).encode()

TARGETS = (
    Target(name="job file", seeds=(_JOB,), feed=_job),
    Target(name="hardware profile", seeds=(_PROFILE,), feed=_profile),
    Target(name="policy file", seeds=(_POLICY,), feed=_policy),
    Target(name="input rows", seeds=_ROWS, feed=_rows),
    Target(
        name="compressed input", seeds=(gzip.compress(b"\n".join(_ROWS * 3))[2:],), feed=_compressed
    ),
    Target(name="safetensors header", seeds=(_HEADER,), feed=_header),
    Target(
        name="safetensors file",
        seeds=(struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(64),),
        feed=_raw_tensors,
    ),
    Target(name="safetensors index", seeds=(_INDEX,), feed=_index),
    Target(name="model config", seeds=(_CONFIG,), feed=_config),
    Target(name="generation config", seeds=(_GENERATION,), feed=_generation),
    Target(name="tokenizer", seeds=(_TOKENIZER,), feed=_tokenizer),
    Target(name="chat template", seeds=_TEMPLATES, feed=_template),
    Target(name="parquet file", seeds=(_table(),), feed=_parquet),
    Target(name="journal", seeds=(_RECORD, _RECORD * 3), feed=_journal),
    Target(name="run folder", seeds=(_MANIFEST, _STATUS), feed=_run_folder),
)
