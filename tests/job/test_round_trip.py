"""From an input file to an output file, with an engine that answers with the prompt."""

import json
from pathlib import Path

import pytest

from moebatch.folder.duplicates import NO_DUPLICATES
from moebatch.folder.final_file import FinalFile
from moebatch.folder.row_key import RowKeys
from moebatch.folder.run_folder import RunFolder
from moebatch.job.scan import scan
from moebatch.journal.finished import Finished
from moebatch.journal.record import Record
from moebatch.journal.writer import JournalWriter
from moebatch.rows.dialects import Served, result_line
from moebatch.rows.prompts import RowReader, open_reader
from moebatch.rows.row import FailedRow, ReadyRow
from moebatch.rows.source import open_source
from moebatch.spec.job import load_job
from moebatch.spec.request import Choice, Outcome, RowError
from tests.tiny import write_tokenizer

BAD = b'{"prompt": "cut of'
LINES = [
    b'\xef\xbb\xbf{"prompt": "The river", "topic": "water"}\r\n',
    b"\n",
    b'{"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": '
    b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}}\n',
    b'{"prompt": "x", "stream": false, "tools": [1]}\n',
    BAD,
]


def _outcome(item: ReadyRow | FailedRow, reader: RowReader) -> Outcome | RowError:
    if isinstance(item, FailedRow):
        return item.error
    tokens = item.request.prompt_tokens
    text = reader.tokenizer.decode(tokens)
    choice = Choice(index=0, tokens=tokens, text=text, finish_reason="stop")
    return Outcome(request=item.request, choices=(choice,))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mixtral"}')
    (tmp_path / "in.jsonl").write_bytes(b"".join(LINES))
    (tmp_path / "job.yaml").write_text(
        f"model: {{path: model}}\ninput: {{path: in.jsonl}}\noutput: {{path: out.jsonl{suffix}}}"
    )
    job = load_job(tmp_path / "job.yaml")
    reader = open_reader(job, vocab_size=320, max_positions=64)
    source = open_source(job.input.path)
    summary = scan(source, reader.request)
    summary.require_usable()
    assert summary.first_chat is not None
    reader.tokenizer.require_chat_template(summary.first_chat.place)
    served = Served(
        model="m",
        token_bytes=reader.tokenizer.token_bytes,
        decode=reader.tokenizer.decode,
        fallback=summary.dialect,
    )
    folder = RunFolder(job.output.path)
    folder.path.mkdir()
    with JournalWriter(folder.journal) as journal:
        for raw in reversed(list(source)):
            item = reader.request(raw)
            key, failed = RowKeys().of(raw, item.row), isinstance(item, FailedRow)
            line = result_line(item.row, _outcome(item, reader), served)
            journal.add(Record(key, 0, "fail" if failed else "done", line))
    with Finished(folder.journal) as finished:
        FinalFile(job.output.path, RowKeys()).write(source, finished, NO_DUPLICATES)

    lines = [row.content for row in open_source(job.output.path)]
    first, chat, tools, cut = (json.loads(line) for line in lines if isinstance(line, bytes))
    assert first["topic"] == "water"
    assert first["response"]["text"] == "The river"
    assert chat["response"]["body"]["choices"][0]["message"]["content"] == "Hi"
    assert tools["response"]["error"]["param"] == "tools"
    assert tools["response"]["error"]["line"] == 4
    assert cut["response"]["error"]["code"] == "invalid_json_line"
