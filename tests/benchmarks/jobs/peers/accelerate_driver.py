"""transformers with accelerate's disk offload, as its users run it: static batches, padded.

    python -m tests.benchmarks.jobs.peers.accelerate_driver MODEL ROWS.jsonl --memory 1GiB

Runs in the peer's own environment and prints a line of JSON for each batch size, doubling it as
long as that is faster: the first batch of rows, for some steps of its answers; the rest follows
from the time of a prefill and of a step. Being killed ends it, and what was printed counts.
"""

import argparse
import json
import os
import time
from dataclasses import asdict
from statistics import median
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from tests.benchmarks.jobs.estimate import Line, Trial, padded_batches_s
from tests.benchmarks.jobs.lengths import Lengths


class Watch(StoppingCriteria):  # type: ignore[misc]
    """Notes when tokens come, and ends after some."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self.moments_s: list[float] = [time.perf_counter()]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.moments_s.append(time.perf_counter())
        is_over = len(self.moments_s) > self._num_steps
        return torch.full((len(input_ids),), is_over, dtype=torch.bool)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--first-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--longest-s", type=float, default=300.0)
    parser.add_argument("--folder", default=".", help="for weights that are offloaded")
    options = parser.parse_args()
    with open(options.rows) as file:  # noqa: PTH123
        rows = [json.loads(line) for line in file]
    lengths = Lengths([len(row["prompt"]) for row in rows], [row["max_tokens"] for row in rows])
    end = time.perf_counter() + options.longest_s
    model = AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory={"cpu": options.memory},
        offload_folder=options.folder,
    )
    batch, best_s = options.first_batch, float("inf")
    while True:
        batch = min(batch, len(rows))
        print(json.dumps({"trying": batch}), flush=True)
        trial = _trial(model, rows[:batch], lengths, options.steps)
        print(json.dumps(asdict(trial)), flush=True)
        if trial.job_s > best_s or batch == len(rows):
            return
        if time.perf_counter() > end:
            print(json.dumps({"ended": "no time for larger batches"}), flush=True)
            return
        best_s, batch = trial.job_s, 2 * batch


def _trial(model: Any, rows: list[dict[str, Any]], lengths: Lengths, num_steps: int) -> Trial:
    longest = max(len(row["prompt"]) for row in rows)
    ids = torch.tensor([[1] * (longest - len(row["prompt"])) + row["prompt"] for row in rows])
    mask = torch.tensor(
        [[0] * (longest - len(row["prompt"])) + [1] * len(row["prompt"]) for row in rows]
    )
    num_new = max(row["max_tokens"] for row in rows)
    watch = Watch(min(num_steps, num_new))
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=1,
            stopping_criteria=StoppingCriteriaList([watch]),
        )
    start, first, *later = watch.moments_s
    prefill_s = first - start
    steps_s = [b - a for a, b in zip([first, *later], later, strict=False)]
    step_s = median(steps_s) if steps_s else prefill_s
    # What a step costs is the price of going through the weights; prompts cost more by the token.
    per_token_s = max(0.0, prefill_s - step_s) / (longest * len(rows))
    line = Line(fixed_s=min(step_s, prefill_s), token_s=per_token_s)
    job_s = padded_batches_s(lengths, len(rows), prefill_s=line.at, step_s=step_s)
    return Trial(
        batch=len(rows),
        job_s=job_s,
        measured_share=min(1.0, (watch.moments_s[-1] - start) / job_s),
        detail=f"prefill {prefill_s:.1f} s, {step_s:.2f} s a step",
    )


if __name__ == "__main__":
    main()
