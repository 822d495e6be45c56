"""Layers that keep a window of tokens, and of what lies before it entries that stand for several: a
ring and a state of each sequence, wherever they live."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.passes import layout
from moebatch.layout.buffers import KV_TERM, KV_WINDOW_TERM
from moebatch.model.decoder import Decoder
from moebatch.plan.runnable import not_runnable
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.model import cache_layout
from moebatch.spec.request import Begun
from tests.engine.test_engine import NEW_TOKENS, policy, tokens_of
from tests.engine.test_memory import problem_of
from tests.engine.test_schedules import EMULATED, emulated
from tests.engine.test_states import ROWS, SLICE, WHERE, answered, built_for
from tests.model.oracle import greedy, load

RING = 9 + SLICE - 1


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("deepseek_v4")


@pytest.fixture(scope="module")
def expected_tokens(folder: Path) -> list[tuple[int, ...]]:
    model = load(folder)
    return [tuple(greedy(model, row.prompt_tokens, NEW_TOKENS)[0]) for row in ROWS]


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences of tens of tokens go round."""
    monkeypatch.setattr(cache_layout, "LARGEST_SLICE", SLICE)
    monkeypatch.setattr(layout, "PROMPT_ROWS", SLICE)


@pytest.mark.few(name=("klotski", "cgopipe"))
@pytest.mark.parametrize("title", WHERE)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_says_what_the_whole_sequence_says(
    folder: Path,
    expected_tokens: list[tuple[int, ...]],
    tmp_path: Path,
    name: str,
    title: str,
) -> None:
    built = built_for(folder, replace(WHERE[title], schedule=name), tmp_path)
    kept = [(group.most_rows, len(group.layers)) for group in built.cache.groups]
    assert kept == [(RING, 5), (1, 2), (1, 2)]
    assert tokens_of(answered(built)) == expected_tokens


def test_what_an_earlier_run_has_left_is_gone_on_with(
    folder: Path, expected_tokens: list[tuple[int, ...]]
) -> None:
    begun = [
        replace(row, begun=(Begun(tokens=tokens[: 1 + row.index % 4], logprobs=()),))
        for row, tokens in zip(ROWS, expected_tokens, strict=True)
    ]
    assert tokens_of(answered(built_for(folder, policy()), begun)) == expected_tokens


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_a_pass_that_failed_in_the_middle_is_computed_again(
    folder: Path,
    expected_tokens: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    layer: int,
) -> None:
    """What entries are made of has been written over by then, in some layers."""
    real, refusals = Decoder.attend, iter([False] * 20 + [True])

    def refusing(self: Decoder, at: int, *arguments: Any) -> None:
        real(self, at, *arguments)
        if at == layer and next(refusals, False):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes")

    monkeypatch.setattr(Decoder, "attend", refusing)
    built = built_for(folder, policy(tokens_per_pass=80))
    assert tokens_of(answered(built)) == expected_tokens
    assert built.engine.statistics.num_shrunk == 1


def test_beginnings_are_not_shared(folder: Path, expected_tokens: list[tuple[int, ...]]) -> None:
    twice = [ROWS[4], replace(ROWS[4], index=1, custom_id="again")]
    built = built_for(folder, policy(batch_size=2))
    assert tokens_of(answered(built, twice)) == 2 * expected_tokens[4:5]
    assert built.engine.statistics.shared_tokens == 0


@pytest.mark.parametrize("title", ["streamed", "on disk", "three levels"])
def test_the_cache_takes_what_was_priced(folder: Path, tmp_path: Path, title: str) -> None:
    chosen = WHERE[title]
    built = built_for(folder, chosen, tmp_path)
    in_cache = {level: built.cache.bytes_on(level) for level in ("vram", "dram")}
    built.close()
    files = open_model(folder, "float32")
    hardware = emulated().hardware
    assert hardware is not None
    asked = problem_of(files, hardware if chosen.ffn_on_gpu else hardware.without("vram"))
    for level, footprint in asked.footprints(chosen).items():
        priced = footprint.terms.get(KV_TERM, 0) + footprint.terms.get(KV_WINDOW_TERM, 0)
        assert in_cache.get(level, priced) == priced


def test_entries_are_not_left_to_the_cpu(folder: Path) -> None:
    hardware = emulated().hardware
    assert hardware is not None
    problem = problem_of(open_model(folder, "float32"), hardware)
    (fault,) = not_runnable(problem, EMULATED["CPU attention"])
    assert fault == (
        "attention_on_gpu",
        "layers that keep entries of several tokens are computed on the GPU; set it to true",
    )
