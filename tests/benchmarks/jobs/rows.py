"""The prompts of a job: lists of token ids, so that their lengths are exact."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.jobs.lengths import Lengths

FIRST_PLAIN_TOKEN = 5
"""Lower ids mean something to the tokenizer."""


def token_rows(lengths: Lengths, vocab_size: int) -> Iterator[list[int]]:
    """Prompts of random tokens, the same in every run."""
    noise = random.Random(2)

    def tokens(count: int) -> list[int]:
        return [noise.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(count)]

    header = tokens(lengths.num_header_tokens)
    for length in lengths.prompts:
        yield header + tokens(length - len(header))


def write_rows(path: Path, lengths: Lengths, vocab_size: int) -> None:
    """An input of `moebatch run`: every row says how many tokens it gets."""
    with path.open("w") as file:
        prompts = token_rows(lengths, vocab_size)
        for index, (prompt, answer) in enumerate(zip(prompts, lengths.answers, strict=True)):
            row = {
                "custom_id": str(index),
                "prompt": prompt,
                "max_tokens": answer,
                "ignore_eos": True,
            }
            file.write(json.dumps(row) + "\n")
