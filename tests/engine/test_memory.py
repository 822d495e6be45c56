"""An engine takes what its policy was priced at, and a planned policy fits its device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.device import IN_MAIN_MEMORY, Device
from moebatch.engine.spec import EngineSpec
from moebatch.errors import OutOfMemory
from moebatch.layout.buffers import (
    DENSE_TERM,
    KV_TERM,
    KV_WINDOW_TERM,
    RESIDENT_TERM,
    SLOTS_TERM,
)
from moebatch.layout.footprint import ACTIVATIONS_TERM, slot_bytes
from moebatch.layout.scratch import decoder_buffers, limits_of
from moebatch.plan.problem import Problem
from moebatch.plan.search.planner import best_policy
from moebatch.spec.machine.hardware import Hardware
from moebatch.spec.policy.policy import Placement, Policy
from moebatch.spec.workload import Length, Workload
from tests.engine.test_engine import NEW_TOKENS, TokenText, requests, tokens_of
from tests.engine.test_schedules import CASES, EMULATED, emulated
from tests.plan.problems import cpu_machine

MAX_TOKENS = 112
FEW_BYTES = 2**20


def problem_of(files: ModelFiles, hardware: Hardware) -> Problem:
    """Rows of the usual tests; nothing is in memory yet."""
    lengths = tuple(Length(len(row.prompt_tokens), NEW_TOKENS) for row in requests())
    prompts = [length.prompt_tokens for length in lengths]
    workload = Workload(
        num_sequences=len(prompts),
        mean_prompt_tokens=sum(prompts) / len(prompts),
        mean_new_tokens=NEW_TOKENS,
        max_total_tokens=MAX_TOKENS,
    )
    link = hardware.links.get("dram->vram")
    return Problem(
        shape=files.shape.attending_within(MAX_TOKENS),
        dtypes=files.dtypes,
        hardware=hardware,
        workload=workload,
        program_bytes={"dram": 1},
        stages=link is not None and link.staging_bandwidth is not None,
    )


def assert_cache_is_as_priced(built: BuiltEngine, folder: Path, chosen: Policy) -> None:
    """Memory that its cache takes, or took, for rows of the usual tests, level by level."""
    files, hardware = open_model(folder, "float32"), emulated().hardware
    assert hardware is not None
    there = hardware if chosen.ffn_on_gpu else hardware.without("vram")
    asked = problem_of(files, there).as_cached
    for level, footprint in asked.footprints(chosen).items():
        priced = footprint.terms.get(KV_TERM, 0) + footprint.terms.get(KV_WINDOW_TERM, 0)
        assert level == "disk" or built.cache.bytes_on(level) == priced


def build(files: ModelFiles, policy: Policy, device: Device, scratch: Path) -> BuiltEngine:
    return build_engine(
        EngineSpec(
            files=files, policy=policy, max_tokens=MAX_TOKENS, device=device, scratch=scratch
        ),
        decoder=TokenText(),
        end_tokens=frozenset(),
        job_seed=0,
    )


def reserved_bytes(asked: Problem, policy: Policy) -> int:
    """What is priced on the device for things that are allocated up front."""
    footprint = asked.footprints(policy)["vram"]
    scratch = decoder_buffers(
        asked.shape,
        limits_of(policy, max_tokens=MAX_TOKENS),
        asked.dtypes.compute_bytes,
        "vram",
        converts=asked.dtypes.converts,
    )
    held = sum(buffer.num_bytes for buffer in scratch)
    return footprint.total_bytes - footprint.terms["activations"] + held


@pytest.mark.few
@pytest.mark.parametrize("title", EMULATED)
@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_device_holds_what_was_priced(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, name: str, family: str, title: str
) -> None:
    files = open_model(tiny_checkpoint(family), "float32")
    device = emulated()
    assert device.hardware is not None
    asked = problem_of(files, device.hardware)
    policy = replace(EMULATED[title], schedule=name)
    built = build(files, policy, device, tmp_path)
    priced = reserved_bytes(asked, policy)
    below = asked.footprints(policy)["dram"].terms
    assert built.memory is not None
    used, in_cache = built.memory.used_bytes, built.cache.bytes_on("dram")
    in_slots = built.experts._arena.num_bytes
    built.close()
    assert used <= priced <= 1.1 * used + FEW_BYTES
    assert in_cache == below.get(KV_TERM, 0) + below.get(KV_WINDOW_TERM, 0)
    experts = below.get(RESIDENT_TERM, 0) + below.get(SLOTS_TERM, 0)
    assert in_slots <= max(experts, 4096)


@pytest.mark.parametrize(
    "family",
    [
        *("mixtral", "qwen2_moe", "deepseek_v32", "deepseek_v4", "axk2", "mistral_large4"),
        *("dots3_note", "muse_spark"),
    ],
)
def test_buffers_have_the_sizes_of_what_an_engine_allocates(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    files = open_model(tiny_checkpoint(family), "float32")
    policy = Policy(
        batch_size=4,
        micro_batch_size=2,
        tokens_per_pass=16,
        num_slots=2,
        num_kv_pages=30,
        weights=Placement(dram=0.4, disk=0.6),
        kv_cache=Placement(dram=0.5, disk=0.5),
    )
    asked = problem_of(files, cpu_machine())
    found = [buffer for buffer in asked.memory.buffers(policy) if buffer.level == "dram"]
    buffers = {buffer.name: buffer.num_bytes for buffer in found}
    assert len(buffers) == len(found), "two have one name"
    cache = sum(buffer.num_bytes for buffer in found if buffer.term in (KV_TERM, KV_WINDOW_TERM))
    built = build(files, policy, IN_MAIN_MEMORY, tmp_path)
    taken, store = built.memory.taken_bytes, built.experts
    built.close()
    assert store is not None
    limits = limits_of(policy, max_tokens=MAX_TOKENS)
    allocated = decoder_buffers(files.shape, limits, 4, "dram", converts=False)
    scratch = sum(buffers[buffer.name] for buffer in allocated)
    assert taken[DENSE_TERM] <= buffers[DENSE_TERM] <= taken[DENSE_TERM] + FEW_BYTES / 8
    assert taken[KV_TERM] == pytest.approx(cache, abs=512)
    assert taken[ACTIVATIONS_TERM] == pytest.approx(scratch, abs=512)
    planned = buffers[RESIDENT_TERM] + buffers[SLOTS_TERM]
    experts = files.dtypes.expert_bytes(files.shape) / slot_bytes(files.shape, files.dtypes)
    assert experts * planned <= store._arena.num_bytes <= planned, "blocks at their borders"


def test_files_of_pages_are_given_back_where_memory_is_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OutOfMemory("refused")

    files = open_model(tiny_checkpoint("mixtral"), "float32")
    policy = Policy(
        batch_size=4,
        micro_batch_size=2,
        tokens_per_pass=16,
        num_slots=0,
        num_kv_pages=30,
        weights=Placement(disk=1.0),
        kv_cache=Placement(dram=1.0),
        schedule="cgopipe",
    )
    before = {*Path("/proc/self/fd").iterdir()}
    monkeypatch.setattr("moebatch.engine.build.PagedExperts", refuse)
    with pytest.raises(OutOfMemory):
        build(files, policy, IN_MAIN_MEMORY, tmp_path)
    assert {*Path("/proc/self/fd").iterdir()} == before


@pytest.mark.few
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("with_disk", [True, False])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7, 1.3])
def test_a_planned_policy_fits_the_device_to_the_last_byte(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    with_disk: bool,
    share: float,
) -> None:
    """`share` is how much of the experts there is room for on the GPU, beside slots for some."""
    files = open_model(tiny_checkpoint(family), "float32")
    device = emulated(2**40)
    assert device.hardware is not None
    hardware = device.hardware if with_disk else device.hardware.without("disk")
    roomy = best_policy(problem_of(files, hardware)).policy
    terms = problem_of(files, hardware).footprints(roomy)["vram"].terms
    capacity = sum(terms.values()) + int((share - 0.6) * terms[RESIDENT_TERM])
    asked = problem_of(files, hardware).with_capacity("vram", capacity)
    policy = best_policy(asked).policy
    needed = reserved_bytes(asked, policy)
    level = replace(asked.hardware.levels["vram"], capacity_bytes=needed)
    tight = replace(asked.hardware, levels={**asked.hardware.levels, "vram": level})
    built = build(files, policy, replace(device, hardware=tight), tmp_path)
    try:
        with torch.inference_mode():
            outcomes = list(built.engine.run(requests()))
    finally:
        built.close()
    assert len(tokens_of(outcomes)) == len(requests())
