"""From an input file to an output file, with an engine that answers with the prompt."""

import json
from pathlib import Path

import pytest

from moebatch.job.dialects import Served, result_line
from moebatch.job.prepare import prepare
from moebatch.job.results import ResultFile
from moebatch.job.row import FailedRow
from moebatch.job.scan import scan
from moebatch.job.source import open_source
from moebatch.spec.job import load_job
from moebatch.spec.request import Choice, Outcome
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


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mixtral"}')
    (tmp_path / "in.jsonl").write_bytes(b"".join(LINES))
    (tmp_path / "job.yaml").write_text(
        f"model: {{path: model}}\ninput: {{path: in.jsonl}}\noutput: {{path: out.jsonl{suffix}}}"
    )
    job = load_job(tmp_path / "job.yaml")
    preparation = prepare(job, vocab_size=320, max_positions=64)
    reader, source = preparation.reader, open_source(job.input.path)
    summary = scan(source, reader.request)
    summary.require_usable()
    assert summary.first_chat is not None
    reader.tokenizer.require_chat_template(summary.first_chat.place)
    served = Served(model="m", token_bytes=reader.tokenizer.token_bytes, fallback=summary.dialect)
    with ResultFile(job.output.path, num_rows=summary.num_rows) as results:
        for item in reversed(list(reader.requests(source))):
            if isinstance(item, FailedRow):
                results.add(item.row.index, result_line(item.row, item.error, served), failed=True)
                continue
            tokens = item.request.prompt_tokens
            text = reader.tokenizer.decode(tokens)
            choice = Choice(index=0, tokens=tokens, text=text, finish_reason="stop")
            outcome = Outcome(request=item.request, choices=(choice,))
            results.add(item.row.index, result_line(item.row, outcome, served), failed=False)
        results.finish()

    lines = [row.content for row in open_source(job.output.path)]
    first, chat, tools, cut = (json.loads(line) for line in lines if isinstance(line, bytes))
    assert first["topic"] == "water"
    assert first["response"]["text"] == "The river"
    assert chat["response"]["body"]["choices"][0]["message"]["content"] == "Hi"
    assert tools["response"]["error"]["param"] == "tools"
    assert tools["response"]["error"]["line"] == 4
    assert cut["response"]["error"]["code"] == "invalid_json_line"
