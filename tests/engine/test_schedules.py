"""Every schedule, in main memory and on an emulated GPU, gives the tokens of transformers."""

import gc
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moebatch.checkpoint.direct import DirectFile
from moebatch.checkpoint.model_files import open_model
from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.device import Device
from moebatch.engine.spec import EngineSpec
from moebatch.model.decoder import Decoder
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.cache_layout import KvCache, SinkWindow, StateCache
from moebatch.spec.policy.policy import Placement, Policy
from moebatch.spec.request import Outcome, Request
from tests.engine.test_engine import TokenText, policy, requests, tokens_of
from tests.schedule.check import check_timeline
from tests.tiny import CACHED_APART, ON_GPU_ALONE

_FAMILIES = (*CACHED_APART, "qwen2_moe")
"""With a shared expert; others differ in arithmetic, and schedules in order."""
_EVERYWHERE = ("mixtral", "deepseek_v3")
_STEPS = ("promoe_base", "promoe_prefetch", "promoe_preempt")
"""Steps to a schedule that is tested itself, out of the same parts."""
_ONE_FAMILY = (*_STEPS, "simple", "multi", "hot", "ondemand", "prefetch_all")
"""These, and those of which the same is true for Klotski and Pre-gated MoE."""
CASES = [
    (name, family)
    for name in SCHEDULES
    for family in (_FAMILIES[:1] if name in _ONE_FAMILY else _FAMILIES)
]
_USUAL = ("usual", "everything resident", "CPU attention", "three levels", "all at once")
"""Policies for families after the first one, and for schedules of which one family is enough."""
IN_MEMORY = {
    "usual": policy(num_slots=9),
    "one slot, batches of one": policy(num_slots=1, micro_batch_size=1, resident=0),
    "everything resident": policy(num_slots=0, resident=1),
    "all at once, many slots": policy(
        num_slots=40, resident=0, batch_size=10, tokens_per_pass=1000, micro_batch_size=100
    ),
}


_ALONE = ("three levels, CPU attention, batches of one", "one sequence")
"""Policies under which each sequence takes passes, or tasks, of its own."""
_FEW = 5
_PLACES = ("memory", "emulated")


def suits(family: str, chosen: Policy) -> bool:
    """Whether the policy does not have a CPU attend for a GPU where that is not done."""
    return family not in ON_GPU_ALONE or chosen.attention_on_gpu == chosen.ffn_on_gpu


def with_policies(policies: Mapping[str, Policy]) -> list[tuple[str, str, str]]:
    """Schedule, family, and all of the policies or the usual ones."""
    return [
        (name, family, title)
        for name, family in CASES
        for title, chosen in policies.items()
        if title in _USUAL or (family in _EVERYWHERE and name not in _ONE_FAMILY)
        if suits(family, chosen)
    ]


def built_for(
    folder: Path,
    chosen: Policy,
    *,
    cached_in: KvCache = "full",
    states: StateCache = "full",
    sink_window: SinkWindow | None = None,
    max_tokens: int = 512,
    **options: object,
) -> BuiltEngine:
    """On an emulated GPU where the policy computes on one and nothing else is asked for."""
    files = open_model(folder, "float32")
    shape = files.shape.cached_in(cached_in, states).seen_through(sink_window)
    device = {"device": emulated()} if chosen.ffn_on_gpu else {}
    order = EngineSpec(
        files=replace(files, shape=shape),
        policy=chosen,
        max_tokens=max_tokens,
        **{"num_traced_passes": 10**6, **device, **options},
    )
    return build_engine(order, decoder=TokenText(), end_tokens=frozenset(), job_seed=0)


def answered(
    built: BuiltEngine, rows: Sequence[Request], *, clock_s: float = 1e-9
) -> list[Outcome]:
    """In input order; every timeline and every owner checked."""
    try:
        with torch.inference_mode():
            outcomes = list(built.engine.run(rows))
        built.check_integrity()
        # Else tasks of other passes are named alike; the plain driver has none.
        if built.recorder is not None and not built.engine.statistics.num_shrunk:
            check_timeline(built.recorder.timeline, clock_s=clock_s)
    finally:
        built.close()
    return sorted(outcomes, key=lambda outcome: outcome.request.index)


def run(
    folder: Path,
    chosen: Policy,
    rows: Sequence[Request],
    *,
    clock_s: float = 1e-9,
    **options: object,
) -> tuple[list[Outcome], BuiltEngine]:
    """What an engine that is built so answers, and the engine."""
    built = built_for(folder, chosen, **options)
    return answered(built, rows, clock_s=clock_s), built


@pytest.mark.few
@pytest.mark.parametrize(("name", "family", "title"), with_policies(IN_MEMORY))
def test_in_main_memory_every_schedule_equals_transformers(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    name: str,
    family: str,
    title: str,
) -> None:
    chosen = replace(IN_MEMORY[title], schedule=name)
    outcomes, _ = run(tiny_checkpoint(family), chosen, requests())
    assert tokens_of(outcomes) == expected(family)


def gpu_policy(
    *, vram: float = 0.3, disk: float = 0.0, kv: Placement | None = None, **changes: object
) -> Policy:
    weights = Placement(vram=vram, dram=1 - vram - disk, disk=disk)
    return replace(
        policy(),
        **{
            "weights": weights,
            "kv_cache": kv or Placement(dram=1.0),
            "ffn_on_gpu": True,
            "attention_on_gpu": True,
            "num_slots": 16,
            **changes,
        },
    )


EMULATED = {
    "GPU attention, cache in main memory": gpu_policy(),
    "CPU attention": gpu_policy(attention_on_gpu=False),
    "CPU attention, cache on the GPU": gpu_policy(attention_on_gpu=False, kv=Placement(vram=1.0)),
    "cache on the GPU, one slot": gpu_policy(vram=0, kv=Placement(vram=1.0), num_slots=1),
    "everything on the GPU": gpu_policy(vram=1, kv=Placement(vram=1.0), num_slots=0),
    "three levels": gpu_policy(
        vram=0.2, disk=0.5, num_slots=3, kv=Placement(vram=0.34, dram=0.33, disk=0.33)
    ),
    "three levels, CPU attention, batches of one": gpu_policy(
        vram=0.1,
        disk=0.9,
        num_slots=2,
        attention_on_gpu=False,
        micro_batch_size=1,
        kv=Placement(dram=0.5, disk=0.5),
    ),
    "one sequence": gpu_policy(batch_size=1, num_slots=2),
    "all at once": gpu_policy(batch_size=10, tokens_per_pass=1000, micro_batch_size=100),
}


def emulated(vram_bytes: int = 2**30, rate: float = 1e12) -> Device:
    """A GPU of so much memory, with links as fast as they can be unless said otherwise."""
    hardware = load_profile("t4").hardware()
    level = replace(hardware.levels["vram"], capacity_bytes=vram_bytes)
    links = {
        name: replace(link, bandwidth=rate, staging_bandwidth=rate)
        for name, link in hardware.links.items()
    }
    hardware = replace(hardware, levels={**hardware.levels, "vram": level}, links=links)
    return Device(kind="emulate", hardware=hardware)


@pytest.mark.few
@pytest.mark.parametrize(("name", "family", "title"), with_policies(EMULATED))
def test_on_an_emulated_gpu_every_schedule_equals_transformers(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    tmp_path: Path,
    name: str,
    family: str,
    title: str,
) -> None:
    chosen = replace(EMULATED[title], schedule=name)
    rows = requests()[: _FEW if title in _ALONE else None]
    outcomes, _ = run(tiny_checkpoint(family), chosen, rows, scratch=tmp_path)
    assert tokens_of(outcomes) == expected(family)[: len(rows)]


@pytest.mark.few
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("step", ["attend", "run_experts"])
@pytest.mark.parametrize("is_emulated", [False, True], ids=_PLACES)
def test_every_schedule_begins_anew_when_memory_was_refused(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    step: str,
    is_emulated: bool,
) -> None:
    """And waits for nothing of the pass that was given up."""
    refusals, real = iter([False] * 7 + [True] + [False] * 10**6), getattr(Decoder, step)

    def refusing(self: Decoder, *arguments: object) -> object:
        if next(refusals):
            raise MemoryError
        return real(self, *arguments)

    monkeypatch.setattr(Decoder, step, refusing)
    chosen = replace(EMULATED["three levels"] if is_emulated else policy(), schedule=name)
    outcomes, built = run(tiny_checkpoint("mixtral"), chosen, requests(), scratch=tmp_path)
    assert built.engine.statistics.num_shrunk == 1
    assert tokens_of(outcomes) == expected("mixtral")


def held() -> tuple[list[threading.Thread], list[str]]:
    """Threads and open files of this process."""
    files = (str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.exists())
    return threading.enumerate(), sorted(files)


@pytest.mark.parametrize(
    ("name", "is_plain"), [("klotski", False), ("klotski", True), ("cgopipe", False)]
)
def test_an_engine_that_is_closed_leaves_neither_threads_nor_open_files(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, name: str, is_plain: bool
) -> None:
    folder, before = tiny_checkpoint("mixtral"), held()
    chosen = replace(policy(), schedule=name, kv_cache=Placement(disk=1), streamed_layers=1)
    built = built_for(folder, chosen, scratch=tmp_path, is_plain=is_plain)
    assert all(len(now) > len(then) for now, then in zip(held(), before, strict=True))
    built.close()
    assert held() == before


def tensors_in_cycles() -> list[torch.Tensor]:
    """Those that only a collection finds to be free; lanes may go on meanwhile."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [each for each in gc.garbage if type(each) is torch.Tensor]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("name", ["klotski", "cgopipe"])
@pytest.mark.parametrize("chosen", [IN_MEMORY["usual"], EMULATED["CPU attention"]], ids=_PLACES)
def test_tensors_of_a_pass_are_freed_when_it_ends(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, name: str, chosen: Policy
) -> None:
    """What refers to itself is there until Python looks for such, after several passes."""
    chosen = replace(chosen, schedule=name, num_slots=16)
    built = built_for(tiny_checkpoint("mixtral"), chosen, scratch=tmp_path, num_traced_passes=0)
    try:
        with torch.inference_mode():
            outcomes = built.engine.run(requests())
            next(outcomes)
            gc.collect()
            gc.disable()
            assert len(list(outcomes)) == len(requests()) - 1
        assert not tensors_in_cycles()
    finally:
        gc.enable()
        built.close()


@pytest.mark.few(name=("klotski", "cgopipe", "flexgen", "pregated", "promoe"))
@pytest.mark.parametrize("is_emulated", [False, True], ids=_PLACES)
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - set(_STEPS)))
def test_hundreds_of_sequences_equal_the_plain_driver(
    tiny_checkpoint: Callable[..., Path],
    hundreds: tuple[list[Request], list[tuple[int, ...]]],
    name: str,
    is_emulated: bool,
) -> None:
    rows, expected_tokens = hundreds
    many = {"batch_size": 300, "micro_batch_size": 70, "tokens_per_pass": 700, "num_kv_pages": 320}
    chosen = policy(resident=0.4, num_slots=5, **many)
    if is_emulated:
        chosen = gpu_policy(attention_on_gpu=name not in ("cgopipe", "fastdecode"), **many)
    outcomes, _ = run(tiny_checkpoint("mixtral"), replace(chosen, schedule=name), rows)
    assert tokens_of(outcomes) == expected_tokens


@pytest.fixture(scope="module")
def hundreds(
    tiny_checkpoint: Callable[..., Path],
) -> tuple[list[Request], list[tuple[int, ...]]]:
    """Rows and what the plain driver makes of them, a few at a time."""
    rows = requests([1 + i % 9 for i in range(300)], max_tokens=3)
    return rows, tokens_of(run(tiny_checkpoint("mixtral"), policy(), rows, is_plain=True)[0])


def test_nothing_goes_up_before_it_has_been_read(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = DirectFile.read

    def read_slowly(file: DirectFile, target: memoryview, offset: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.02)
        read(file, target, offset)

    monkeypatch.setattr(DirectFile, "read", read_slowly)
    chosen = gpu_policy(vram=0.0, schedule="hot")
    outcomes, _ = run(tiny_checkpoint("qwen2_moe"), chosen, requests())
    assert tokens_of(outcomes) == expected("qwen2_moe")
