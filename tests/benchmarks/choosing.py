"""One layer's attention where tokens choose what they attend to, and where they attend to all.

    python -m tests.benchmarks.choosing [--before 4096,8192,32768] [--heads 128] [--repeats 3]

The layer is DeepSeek-V3.2's, in bfloat16, projections included: eight sequences that decode, and a
slice of 128 tokens of a prompt. Prints the least milliseconds a token of some repeats.
"""

import argparse
from time import perf_counter
from typing import Any

import numpy as np
import torch

from moebatch.layout.scratch import Limits, step_elements
from moebatch.model.attention.core import AttentionCore
from moebatch.model.attention.latent import LatentAttentionBlock
from moebatch.model.attention.span import Span
from moebatch.model.batch import BatchPlanner
from moebatch.model.elementwise import Elementwise
from moebatch.model.layer_work import LayerWork
from moebatch.model.operators import Operators
from moebatch.model.products import Products
from moebatch.model.scratch import Scratch
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
DECODING, SLICE = (8, 1), (1, 128)
"""Sequences, and new tokens of each."""


def config_of(num_heads: int) -> dict[str, Any]:
    """One layer, whose other figures are usual ones."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "first_k_dense_replace": 0,
    }


def milliseconds(
    shape: ModelShape, config: dict[str, Any], before: int, sequences: int, new: int, repeats: int
) -> float:
    """Of a token, with so many of its sequence before the new ones."""
    num_tokens, length = sequences * new, before + new
    limits = Limits(pass_tokens=num_tokens, micro_batch_tokens=num_tokens, context_tokens=length)
    options: dict[str, Any] = {"dtype": DTYPE, "device": CPU}
    planner = BatchPlanner(shape, config, gather_rows=limits.gather_rows, **options)
    core = AttentionCore(shape, limits, **options)
    operators = Operators(Products(CPU, DTYPE), Elementwise(shape.activation, CPU))
    block = LatentAttentionBlock(shape, shape.attention, operators, core)
    scratch = Scratch(step_elements(shape, limits), **options)
    sizes = shape.attention.tensors(shape.hidden_size)
    weights = {role: (0.02 * torch.randn(size)).to(DTYPE) for role, size in sizes.items()}
    parts = tuple(
        torch.randn(sequences * length, part.num_heads, part.head_dim).to(DTYPE)
        for part in shape.attention.cache.parts
    )
    places = np.arange(sequences * length).reshape(sequences, length)
    spans = [Span(n * new, new, before, rows_S, before) for n, rows_S in enumerate(places)]
    x_TD, taken = torch.randn(num_tokens, shape.hidden_size).to(DTYPE), list[float]()
    for _ in range(repeats):
        micro_batch, start = planner.plan(spans), perf_counter()
        work = LayerWork(
            layer=0,
            frame=scratch.frame(),
            normed_ND=x_TD,
            micro_batch=micro_batch,
            weights=weights,
            parts=parts,
        )
        block.attend(work)
        taken.append(perf_counter() - start)
    return 1e3 * min(taken) / num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default="4096,8192,32768")
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    config = config_of(options.heads)
    choosing = read_shape(config, "config.json")
    shapes = {"all": choosing.attending_within(1), "chosen": choosing}
    print("| tokens before | new | all | chosen |\n| --- | --- | --- | --- |")
    for before in map(int, options.before.split(",")):
        for sequences, new in (DECODING, SLICE):
            found = [
                milliseconds(shape, config, before, sequences, new, options.repeats)
                for shape in shapes.values()
            ]
            print(f"| {before:,} | {sequences} x {new} | {found[0]:.1f} | {found[1]:.1f} |")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
