"""The memory budget bounds the whole process, and the report says what the kernel says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from moebatch.units import parse_bytes
from tests.tiny import quiet, write_tokenizer

BUDGET = "640MiB"


def write_model(folder: Path, dtype: torch.dtype) -> int:
    """A model of 64 experts of 2.75 million numbers; returns their bytes together."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=4000,
        hidden_size=512,
        intermediate_size=1792,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_local_experts=8,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    with quiet():
        model = MixtralForCausalLM(config).to(dtype)
        model.save_pretrained(folder, max_shard_size="100MB")
    write_tokenizer(folder)
    return 64 * 3 * 512 * 1792 * dtype.itemsize


WATCHED = """
import atexit, sys
from moebatch.cli import main

status = sys.argv.pop()
atexit.register(lambda: open(status, "w").write(open("/proc/self/status").read()))
main()
"""
"""The command, which leaves behind what the kernel says of it in the end."""


def watched_run(job: Path) -> tuple[int, str, int]:
    """Exit code, report, and the most memory that the kernel saw the process hold, in bytes."""
    status = job.with_name("status")
    command = [sys.executable, "-c", WATCHED, "run", str(job), "--details", str(status)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    held = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    assert held is not None
    return done.returncode, done.stderr, int(held[1]) * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_larger_than_what_the_budget_leaves_stays_within_it(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model_bytes = write_model(tmp_path / "model", dtype)
    prompts = [{"prompt": [3 + (i * j) % 300 for j in range(20)]} for i in range(1, 41)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    job = {
        "model": {"path": "model"},
        "input": {"path": "in.jsonl"},
        "output": {"path": "out.jsonl"},
        "sampling": {"max_tokens": 4, "temperature": 0.8, "top_p": 0.9},
        "resources": {"dram": BUDGET, "threads": 1},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    code, report, by_kernel = watched_run(tmp_path / "job.yaml")
    assert code == 0, report
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(prompts)

    streamed = re.search(r"experts (?:[\d.]+ % dram, )?([\d.]+) % disk", report)
    assert streamed is not None and float(streamed[1]) > 1, "experts had to be streamed"
    reported = re.search(r"peak memory +([\d.]+) MiB of 640 MiB", report)
    assert reported is not None
    assert 0.8 * parse_bytes(BUDGET) <= by_kernel <= parse_bytes(BUDGET)
    assert abs(float(reported[1]) * 2**20 - by_kernel) < 0.02 * by_kernel
    assert model_bytes > 0.5 * parse_bytes(BUDGET)
