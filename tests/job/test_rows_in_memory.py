"""Rows that wait for their turn take no more of main memory than is planned for them."""

import gc
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from moebatch.engine.sequence import Sequence
from moebatch.engine.text import AnswerText
from moebatch.folder.results import Results
from moebatch.folder.row_key import RowKeys
from moebatch.job.answering import Answering
from moebatch.job.opened import OpenedJob
from moebatch.job.scan import scan
from moebatch.journal.finished import Finished
from moebatch.journal.writer import JournalWriter
from moebatch.spec.job import Job
from moebatch.spec.policy.policy import Placement, Policy
from tests.plan.problems import cpu_machine, problem

NUM_ROWS = 3000
UNUSED: Any = None


def test_short_rows_count_with_all_that_is_kept_of_each(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    rows = ({"id": f"row-{i}", "prompt": f"Seven {i}", "max_tokens": 9} for i in range(NUM_ROWS))
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    job = Job.model_validate(
        {
            "model": {"path": str(tiny_checkpoint("mixtral"))},
            "input": {"path": str(tmp_path / "in.jsonl")},
            "output": {"path": str(tmp_path / "out.jsonl")},
        }
    )
    opened = OpenedJob(job)
    reader = opened.reader
    counted = scan(opened.source, reader.request)
    journal = tmp_path / "journal"
    with Finished(journal) as before, JournalWriter(journal) as ours:
        results = Results(before, ours, RowKeys())
        answering = Answering(opened.source, reader, results, UNUSED, counted)
        gc.collect()
        tracemalloc.start()
        waiting = [
            (-request.sampling.max_tokens, request.index, [sequence])
            for request in answering.requests()
            for sequence in [Sequence(request, 0, AnswerText(reader.tokenizer, request.sampling))]
        ]
        taken_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(waiting) == NUM_ROWS
    one = Policy(
        batch_size=1,
        micro_batch_size=1,
        tokens_per_pass=16,
        num_slots=4,
        num_kv_pages=4,
        weights=Placement(dram=1),
        kv_cache=Placement(dram=1),
    )
    asked = replace(problem(cpu_machine()).memory, instruction_set="avx512bf16")
    memory = replace(asked, workload=counted.workload)
    (planned,) = (each for each in memory.buffers(one) if each.name == "rows in work")
    assert 0.7 * planned.num_bytes < taken_bytes < planned.num_bytes
