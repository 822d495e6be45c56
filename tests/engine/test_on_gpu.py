"""Schedules on a real GPU: `make test-gpu` where there is one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.device import Device
from moebatch.engine.spec import EngineSpec
from moebatch.schedule.registry import SCHEDULES
from moebatch.schedule.timeline.timeline import Timeline
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.policy.policy import Placement, Policy
from moebatch.spec.request import Request
from tests.engine.test_engine import TokenText, requests, tokens_of
from tests.engine.test_schedules import EMULATED, gpu_policy, run, suits
from tests.schedule.check import check_timeline
from tests.tiny import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
CLOCK_S = 1e-4
"""How far the clocks of host and GPU may be apart."""
VRAM_BYTES = 3 * 2**30


def cuda(vram_bytes: int = 2**30) -> Device:
    """The GPU, of which so much may be used."""
    hardware = load_profile("h100").hardware()
    level = replace(hardware.levels["vram"], capacity_bytes=vram_bytes)
    hardware = replace(hardware, levels={**hardware.levels, "vram": level})
    return Device(kind="cuda", hardware=hardware)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_equals_transformers(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    tmp_path: Path,
    family: str,
    name: str,
) -> None:
    fitting = {title: each for title, each in EMULATED.items() if suits(family, each)}
    for title, chosen in fitting.items():
        outcomes, _ = run(
            tiny_checkpoint(family),
            replace(chosen, schedule=name),
            requests(),
            device=cuda(),
            scratch=tmp_path,
            clock_s=CLOCK_S,
        )
        assert tokens_of(outcomes) == expected(family), title


# --- a model whose weights take longer on their way than everything else ------------------------

LARGE = {"hidden_size": 1024, "intermediate_size": 3584, "num_local_experts": 8}
NUM_LAYERS = 6
PROMPTS = requests([12] * 32, max_tokens=12)


def streaming(name: str) -> Policy:
    """All experts come up in every pass; keys and values stay."""
    return gpu_policy(
        schedule=name,
        vram=0,
        kv=Placement(vram=1.0),
        num_slots=16,
        batch_size=32,
        micro_batch_size=8,
        tokens_per_pass=1000,
        num_kv_pages=100,
    )


@pytest.fixture(scope="module")
def large(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("mixtral", num_hidden_layers=NUM_LAYERS, **LARGE)


def built_for(folder: Path, name: str) -> BuiltEngine:
    order = EngineSpec(
        files=open_model(folder, "float32"),
        policy=streaming(name),
        max_tokens=64,
        num_traced_passes=1000,
        device=cuda(VRAM_BYTES),
    )
    return build_engine(order, decoder=TokenText(), end_tokens=frozenset(), job_seed=0)


def outcomes_of(built: BuiltEngine, rows: list[Request]) -> Iterator[object]:
    with torch.inference_mode():
        yield from built.engine.run(rows)


@pytest.fixture(params=["klotski", "multi", "cgopipe"])
def timeline(request: pytest.FixtureRequest, large: Path) -> Iterator[Timeline]:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    built = built_for(large, request.param)
    try:
        assert len(list(outcomes_of(built, PROMPTS))) == len(PROMPTS)
        assert torch.cuda.max_memory_allocated() - before <= VRAM_BYTES
        assert built.recorder is not None
        yield built.recorder.timeline
    finally:
        built.close()


def test_copies_and_kernels_overlap_and_the_link_is_never_idle(timeline: Timeline) -> None:
    check_timeline(timeline, clock_s=CLOCK_S)
    since_s = timeline.steady_since_s
    lanes = {lane: timeline.busy_s(lane, since_s=since_s) for lane in timeline.lanes}
    length_s = timeline.length_s - since_s
    shares = {lane: f"{busy_s / length_s:.1%}" for lane, busy_s in lanes.items()}
    print(f"busy in {length_s:.3f} s of decoding: {shares}")
    assert lanes["gpu"] + lanes["dram->vram"] > length_s, shares
    assert lanes["dram->vram"] >= 0.9 * length_s, shares


def test_nothing_waits_for_the_whole_device(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("the device has been waited for")

    built = built_for(large, "klotski")
    try:
        monkeypatch.setattr(torch.cuda, "synchronize", refuse)
        assert len(list(outcomes_of(built, PROMPTS[:8]))) == 8
    finally:
        monkeypatch.undo()
        built.close()


def test_rows_that_break_are_told_with_their_place(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from tests.engine.test_engine import break_expert

    folder = break_expert(tiny_checkpoint("mixtral"), tmp_path / "broken", layer=1, expert=4)
    outcomes, _ = run(folder, gpu_policy(), requests(), device=cuda(), clock_s=CLOCK_S)
    messages = {outcome.error.message for outcome in outcomes if outcome.error}
    assert any(message.endswith("first seen in layer 1, expert 4") for message in messages)
