"""Keys and values in 8 bits: every schedule, wherever they lie, says what transformers does when it
rounds them so."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from moebatch.model.attention.cached_numbers import decode, encode
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.model.cache_layout import CacheDtype
from moebatch.spec.policy.policy import pages_of
from tests.engine.test_engine import NEW_TOKENS, policy, requests, tokens_of
from tests.engine.test_schedules import EMULATED, IN_MEMORY, run
from tests.model.oracle import greedy, load, rounding_cache

WHERE = {
    "streamed": IN_MEMORY["usual"],
    "resident": IN_MEMORY["everything resident"],
    "small slices": policy(tokens_per_pass=9, batch_size=3, num_slots=9),
    "sent back": policy(num_kv_pages=pages_of(96 + NEW_TOKENS), num_slots=9),
    "CPU attention": EMULATED["CPU attention"],
    "three levels": EMULATED["three levels"],
}
ROWS = requests((1, 17, 40, 3, 96, 33))


@pytest.fixture(scope="module")
def rounded(tiny_checkpoint: Callable[..., Path]) -> dict[CacheDtype, list[tuple[int, ...]]]:
    """What transformers says to the rows."""
    model = load(tiny_checkpoint("mixtral"))

    def tokens(prompt: Sequence[int], dtype: CacheDtype) -> tuple[int, ...]:
        cache = rounding_cache(lambda x: decode(encode(x, dtype), dtype, torch.empty_like(x)))
        return tuple(greedy(model, prompt, NEW_TOKENS, cache=cache)[0])

    return {
        dtype: [tokens(row.prompt_tokens, dtype) for row in ROWS] for dtype in get_args(CacheDtype)
    }


@pytest.mark.few(name=("klotski", "cgopipe"))
@pytest.mark.parametrize("dtype", get_args(CacheDtype))
@pytest.mark.parametrize("title", WHERE)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_says_what_transformers_does_with_rounded_keys_and_values(
    tiny_checkpoint: Callable[..., Path],
    rounded: dict[CacheDtype, list[tuple[int, ...]]],
    tmp_path: Path,
    name: str,
    title: str,
    dtype: CacheDtype,
) -> None:
    chosen = replace(WHERE[title], schedule=name)
    folder = tiny_checkpoint("mixtral")
    outcomes, _ = run(folder, chosen, ROWS, cached_in=dtype, scratch=tmp_path)
    assert tokens_of(outcomes) == rounded[dtype]
