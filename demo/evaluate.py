"""Marks a checkpoint by transformers' own greedy generation: what the runner is held against.

`python -m demo.evaluate DIR` prints the mark over many held-out tasks in bfloat16 and
float32, and which experts the kinds of tasks use.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.marking import mark_answers
from demo.routing import expert_shares, routing_report
from demo.rows import MAX_ANSWER_TOKENS
from demo.tasks import demo_tasks

_ROWS_AT_ONCE: Final = 50
_REPORT_SEED: Final = 7  # other rows than those of jobs/demo.jsonl
_REPORT_TASKS: Final = 1400


def generate_answers(
    checkpoint: Path, questions: Mapping[str, str], dtype: torch.dtype
) -> dict[str, str]:
    """Answers to prompts, both by custom_id, computed in this dtype."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    names = list(questions)
    answers: dict[str, str] = {}
    for start in range(0, len(names), _ROWS_AT_ONCE):
        chunk = names[start : start + _ROWS_AT_ONCE]
        inputs = tokenizer.apply_chat_template(
            [[{"role": "user", "content": questions[name]}] for name in chunk],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        generated = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS)
        said = generated[:, inputs["input_ids"].shape[1] :]
        answers.update(
            zip(chunk, tokenizer.batch_decode(said, skip_special_tokens=True), strict=True)
        )
    return answers


def report(checkpoint: Path) -> None:
    """Prints the marks of a checkpoint and its router table."""
    tasks = demo_tasks(_REPORT_SEED, _REPORT_TASKS)
    questions = {str(index): task.prompt for index, task in enumerate(tasks)}
    for dtype in (torch.bfloat16, torch.float32):
        mark = mark_answers(questions, generate_answers(checkpoint, questions, dtype))
        rights = ", ".join(f"{kind} {mark.right[kind]}/{mark.total[kind]}" for kind in mark.total)
        print(f"{dtype}: {mark.share:.1%} right ({rights})")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    print(routing_report(expert_shares(model, tokenizer)))


def main() -> None:
    """Command line of the evaluation."""
    parser = argparse.ArgumentParser(prog="python -m demo.evaluate", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    report(parser.parse_args().checkpoint)


if __name__ == "__main__":
    main()
