"""Decode attention on the CPU, compiled kernel beside torch: a command of its own, no test.

    python -m tests.benchmarks.attention [--seconds 3] [--dtype bfloat16] [--only ragged] [--best]

Prints GB/s of keys and values that a layer's attention gets through, for batches of several
lengths over a cache whose pages lie in no order. Kernel, torch and a probe that adds up memory take
turns, so what disturbs one disturbs all; of each the median counts, or with --best the fastest.
The last columns are the kernel's share of the probe's rate and how many times as fast as torch it
is.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moebatch.layout.scratch import Limits
from moebatch.model.attention.by_torch import Qkv
from moebatch.model.attention.core import AttentionCore
from moebatch.model.attention.span import Span
from moebatch.model.batch import BatchPlanner
from moebatch.model.native import loader
from moebatch.spec.model.shape_reader import read_shape
from moebatch.spec.policy.policy import PAGE_TOKENS, pages_of
from moebatch.store.memory import Arena

PROBE_BYTES = 512 * 2**20
_PATTERN_ELEMENTS = 2**16
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch: heads as (query heads, KV heads, head size), and what every sequence sees."""

    name: str
    heads: tuple[int, int, int]
    contexts: Sequence[int]


def ragged(count: int, mean: float, most: int) -> list[int]:
    """Lengths as prompts have them: log-normal, a long tail cut off."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, generator=generator)
    lengths = torch.exp(math.log(mean) - 0.32 + 0.8 * noise).round().int()
    return lengths.clamp(1, most).tolist()


MIXTRAL, WIDE, NARROW, MANY, ALONE = (
    (16, 4, 128),
    (32, 8, 128),
    (32, 8, 64),
    (32, 4, 128),
    (16, 16, 128),
)
CASES = (
    Case(name="512 x 32", heads=MIXTRAL, contexts=[32] * 512),
    Case(name="512 x 100", heads=MIXTRAL, contexts=[100] * 512),
    Case(name="256 x 400", heads=MIXTRAL, contexts=[400] * 256),
    Case(name="64 x 2000", heads=MIXTRAL, contexts=[2000] * 64),
    Case(name="1 x 30000", heads=MIXTRAL, contexts=[30000]),
    Case(name="512 ragged, mean 100", heads=MIXTRAL, contexts=ragged(512, 100, 418)),
    Case(name="128 ragged, mean 800", heads=MIXTRAL, contexts=ragged(128, 800, 4000)),
    Case(name="128 x 400", heads=WIDE, contexts=[400] * 128),
    Case(name="128 ragged, mean 400", heads=WIDE, contexts=ragged(128, 400, 2000)),
    Case(name="256 x 400", heads=NARROW, contexts=[400] * 256),
    Case(name="256 x 400", heads=MANY, contexts=[400] * 256),
    Case(name="128 x 200", heads=ALONE, contexts=[200] * 128),
)


class Bench:
    """One layer's core, a cache that the cases share, and memory for the probe."""

    def __init__(self, case: Case, dtype: torch.dtype, cache: Tensor) -> None:
        num_heads, num_kv_heads, head_dim = case.heads
        config = _config(case)
        shape = read_shape(config, "synthetic")
        longest, count = max(case.contexts), len(case.contexts)
        limits = Limits(pass_tokens=count, micro_batch_tokens=count, context_tokens=longest)
        cpu = torch.device("cpu")
        self._core = AttentionCore(shape, limits, dtype=dtype, device=cpu)
        spans, num_pages = _spans(case.contexts)
        size = (num_pages * PAGE_TOKENS, num_kv_heads, head_dim)
        numbers = math.prod(size)
        halves = cache.view(dtype)
        assert 2 * numbers <= len(halves), "the cache holds the largest case"
        self._kv = halves[:numbers].view(size), halves[numbers : 2 * numbers].view(size)
        planner = BatchPlanner(
            shape, config, dtype=dtype, device=cpu, gather_rows=limits.gather_rows
        )
        self._with_kernel = planner.plan(spans)
        with switched_off():
            self._with_torch = planner.plan(spans)
        kv = (count, num_kv_heads, head_dim)
        query = torch.randn(count, num_heads, head_dim).to(dtype)
        self._qkv = Qkv(query, tuple(torch.randn(2, *kv).to(dtype)))
        self._out_THC = torch.empty_like(self._qkv.q_THC)
        self.num_bytes = sum(case.contexts) * 2 * num_kv_heads * head_dim * dtype.itemsize

    def kernel(self) -> None:
        """Attention by plans for the kernel, if there is one."""
        self._core.attend(0, self._qkv, self._with_kernel, self._kv, self._out_THC)

    def torch(self) -> None:
        """Attention by plans for torch."""
        self._core.attend(0, self._qkv, self._with_torch, self._kv, self._out_THC)


@contextmanager
def switched_off() -> Iterator[None]:
    """Plans that are made here leave everything to torch."""
    before = os.environ.get(loader.SWITCH)
    os.environ[loader.SWITCH] = "0"
    try:
        yield
    finally:
        del os.environ[loader.SWITCH]
        if before is not None:
            os.environ[loader.SWITCH] = before


def _spans(contexts: Sequence[int]) -> tuple[list[Span], int]:
    """Single tokens that see so many positions, themselves included; and how many pages."""
    counts = [pages_of(context) for context in contexts]
    pages = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    rows = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).split(counts)
    spans = [
        Span(
            start=i,
            num_tokens=1,
            context=context - 1,
            rows_S=part.flatten()[:context].numpy(),
            rope_length=context,
        )
        for i, (part, context) in enumerate(zip(rows, contexts, strict=True))
    ]
    return spans, len(pages)


def _config(case: Case) -> dict[str, Any]:
    num_heads, num_kv_heads, head_dim = case.heads
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": 8,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "max_position_embeddings": max(case.contexts),
        "sliding_window": None,
    }


def seconds_of_each(
    calls: Sequence[Callable[[], object]],
    budget_s: float,
    typical: Callable[[Sequence[float]], float],
) -> list[float]:
    """Of calls that take turns, at least three times, after a first time for each."""
    for call in calls:
        call()
    rounds: list[list[float]] = []
    start = time.perf_counter()
    while len(rounds) < 3 or time.perf_counter() - start < budget_s:
        rounds.append([_once(call) for call in calls])
    return [typical(column) for column in zip(*rounds, strict=True)]


def _once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _noise(num_bytes: int, dtype: torch.dtype) -> Tensor:
    memory = Arena(num_bytes).bytes
    pattern = torch.randn(_PATTERN_ELEMENTS).to(dtype)
    for part in memory.view(dtype).split(_PATTERN_ELEMENTS):
        part.copy_(pattern[: len(part)])
    return memory


def _cache_bytes(cases: Sequence[Case], dtype: torch.dtype) -> int:
    return (
        max(
            sum(map(pages_of, case.contexts)) * PAGE_TOKENS * 2 * math.prod(case.heads[1:])
            for case in cases
        )
        * dtype.itemsize
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row of the table")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--best", action="store_true", help="the fastest instead of the median")
    options = parser.parse_args()
    typical = min if options.best else median
    dtype = DTYPES[options.dtype]
    cases = [case for case in CASES if options.only in case.name]
    kernel = loader.prepare() or "compiled"
    print(f"kernel: {kernel}; {torch.get_num_threads()} threads; {options.dtype}")
    cache = _noise(_cache_bytes(cases, dtype), dtype)
    probe = Arena(PROBE_BYTES).bytes.view(torch.int64)
    print(f"{'heads':>12} {'sequences x context':22} kernel   torch   probe  of probe  of torch")
    with torch.inference_mode():
        for case in cases:
            bench = Bench(case, dtype, cache)
            kernel_s, torch_s, probe_s = seconds_of_each(
                [bench.kernel, bench.torch, probe.sum], options.seconds, typical
            )
            kernel, plain = bench.num_bytes / kernel_s, bench.num_bytes / torch_s
            read = probe.nbytes / probe_s
            heads = "{}/{} x {}".format(*case.heads)
            print(
                f"{heads:>12} {case.name:22} {kernel / 1e9:6.1f}  {plain / 1e9:6.1f}  "
                f"{read / 1e9:6.1f}  {kernel / read:7.0%}  {kernel / plain:7.1f}x",
                flush=True,
            )


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the text above."""


if __name__ == "__main__":
    main()
