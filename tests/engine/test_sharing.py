"""Rows that begin alike compute that beginning once, and nobody's answer changes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moebatch.spec.policy.policy import Placement, pages_of
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from tests.engine.test_engine import NEW_TOKENS, policy, tokens_of
from tests.engine.test_schedules import gpu_policy, run
from tests.model.oracle import greedy_answers, load

HEADERS = ([9] * 20 + [7, 8] * 20, [9] * 20 + [5] * 13)
"""Two that begin with one full page alike."""
ENDS = ([11, 12, 13], [14], [11, 12, 13, 15, 16], [], [3] * 40)
IN_MEMORY = {
    "usual": policy(),
    "one sequence at a time": policy(batch_size=1, num_slots=1, resident=0),
    "prompts in small slices": policy(tokens_per_pass=9, batch_size=3),
    "all at once": policy(batch_size=40, tokens_per_pass=1000, micro_batch_size=100),
    "cache so small that sequences are sent back": policy(num_kv_pages=pages_of(100 + 12)),
}
ON_GPU = {
    "cache on the GPU": gpu_policy(kv=Placement(vram=1.0)),
    "cache in main memory, GPU attention": gpu_policy(),
    "CPU attention": gpu_policy(attention_on_gpu=False),
    "few pages, on disk": gpu_policy(
        kv=Placement(disk=1.0), num_kv_pages=pages_of(100 + NEW_TOKENS)
    ),
    "cache on three levels": gpu_policy(
        vram=0.2, disk=0.5, num_slots=3, kv=Placement(vram=0.34, dram=0.33, disk=0.33)
    ),
}


def rows(**sampling: object) -> list[Request]:
    prompts = [header + end for end in ENDS for header in HEADERS] * 2
    settings = {"temperature": 0.0, "max_tokens": NEW_TOKENS, **sampling}
    return [
        Request(
            index=index,
            custom_id=f"row-{index}",
            prompt_tokens=tuple(prompt),
            sampling=Sampling(**settings),
        )
        for index, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def model_and_tokens(
    tiny_checkpoint: Callable[..., Path],
) -> tuple[Path, list[tuple[int, ...]]]:
    folder = tiny_checkpoint("mixtral")
    model = load(folder)
    return folder, greedy_answers(model, rows(), NEW_TOKENS)


@pytest.mark.few
@pytest.mark.parametrize("chosen", IN_MEMORY.values(), ids=IN_MEMORY.keys())
@pytest.mark.parametrize("schedule", ["klotski", "cgopipe"])
def test_answers_stay_those_of_transformers(
    model_and_tokens: tuple[Path, list[tuple[int, ...]]], chosen: object, schedule: str
) -> None:
    folder, expected = model_and_tokens
    outcomes, built = run(folder, replace(chosen, schedule=schedule), rows())
    assert tokens_of(outcomes) == expected
    assert built.engine.statistics.shared_tokens > 0


@pytest.mark.few
@pytest.mark.parametrize("chosen", ON_GPU.values(), ids=ON_GPU.keys())
@pytest.mark.parametrize("schedule", ["klotski", "cgopipe"])
def test_answers_stay_those_of_transformers_wherever_the_cache_lives(
    model_and_tokens: tuple[Path, list[tuple[int, ...]]],
    tmp_path: Path,
    chosen: object,
    schedule: str,
) -> None:
    folder, expected = model_and_tokens
    chosen = replace(chosen, schedule=schedule)
    outcomes, built = run(folder, chosen, rows(), scratch=tmp_path)
    assert tokens_of(outcomes) == expected
    assert built.engine.statistics.shared_tokens > 0


def test_choices_of_a_row_share_its_prompt_and_differ_all_the_same(
    model_and_tokens: tuple[Path, list[tuple[int, ...]]],
) -> None:
    folder, _ = model_and_tokens
    sampled = rows(temperature=0.9, n=3)
    shared, built = run(folder, policy(), sampled)
    alone, unshared = run(folder, policy(), sampled, shares=False)
    assert tokens_of(shared) == tokens_of(alone)
    assert len(set(tokens_of(shared))) > len(sampled)
    assert unshared.engine.statistics.shared_tokens == 0
    saved = built.engine.statistics.shared_tokens
    computed, computed_alone = (both.engine.statistics.prompt_tokens for both in (built, unshared))
    assert computed_alone - computed == saved > 0


def test_a_header_is_computed_once_for_a_whole_file(
    model_and_tokens: tuple[Path, list[tuple[int, ...]]],
) -> None:
    folder, _ = model_and_tokens
    header = HEADERS[0]
    chosen = policy(batch_size=40, tokens_per_pass=600, micro_batch_size=100)
    _, built = run(folder, chosen, [row for row in rows() if row.index % 2 == 0])
    pages = (len(header) - 2) // 16 * 16
    assert built.engine.statistics.shared_tokens >= 9 * pages


def test_where_keys_depend_on_the_length_of_the_sequence_nothing_is_shared(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    scaling = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}
    folder = tiny_checkpoint("qwen3_moe", rope_parameters=scaling, max_position_embeddings=32)
    _, built = run(folder, policy(), rows())
    assert built.engine.statistics.shared_tokens == 0
