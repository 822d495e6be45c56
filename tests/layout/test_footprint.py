"""What is priced is what the executor allocates, on every level, for any policy."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from moebatch.errors import DoesNotFit
from moebatch.layout.buffers import KV_TERM, KV_WINDOW_TERM, RESIDENT_TERM, SLOTS_TERM, SPARE_TERM
from moebatch.layout.division import Division, most_streamed
from moebatch.layout.footprint import Footprint, packed_bytes, slot_bytes
from moebatch.layout.ladder import Ladder
from moebatch.layout.placed import PlacedModel, streamed_per_layer
from moebatch.layout.scratch import SAMPLING_LOGITS
from moebatch.plan.problem import Problem
from moebatch.plan.search.planner import best_policy
from moebatch.schedule.registry import SCHEDULES, traits_of
from moebatch.schedule.steps.kv_route import Place
from moebatch.spec.machine.hardware import Hardware, LevelName
from moebatch.spec.model.models import load_model
from moebatch.spec.model.recurrence import GatedDelta
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.policy.policy import Placement, Policy, pages_of
from moebatch.spec.workload import Workload
from moebatch.store.kv.cache import KVCache
from moebatch.store.kv.layout import KvLayout
from moebatch.store.kv.levels import NUM_WINDOWS
from tests.few import examples
from tests.plan.problems import SHAPE, SMALL, cpu_machine, gpu_machine, problem

MANY = examples(15)
MIB = 2**20
MANY_EXPERTS = load_model("qwen3-30b-a3b").shape
DENSE_FIRST = load_model("deepseek-moe-16b").shape
ALTERNATING = load_model("gpt-oss-20b").shape


MATRICES = GatedDelta(
    num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128, conv_width=4
)
"""As large as in Qwen3-Next: 32 heads of 128 x 128 in float32, and 3 inputs of 8,192."""
STATE_BYTES = 32 * 128 * 128 * 4 + 3 * 8192 * 2
RECURRING = replace(
    SHAPE, recurrence=MATRICES, recurrent_layers=tuple(n for n in range(32) if n % 4 < 3)
)
WIDE_ROW, NARROW_ROW = 2 * 8 * 128 * 2, 2 * 2 * 256 * 2
GLOBAL = tuple(n for n in range(32) if n % 6 == 5)
TWO_WAYS = replace(
    SHAPE,
    sliding_windows=tuple(None if n in GLOBAL else 1024 for n in range(32)),
    layer_attentions=tuple(
        replace(SHAPE.attention, num_kv_heads=2, head_dim=256) if n in GLOBAL else SHAPE.attention
        for n in range(32)
    ),
)
"""Five of six layers slide, and the others have fewer and larger heads."""
UNLIKE = [
    load_model(name).shape for name in ("hy4-preview", "deepseek-v4-flash", "switch-base-128")
]
"""Layers keep keys to choose by beside latents, or a state beside a window, or nothing."""
SHAPES = st.sampled_from(
    [SHAPE, SMALL, MANY_EXPERTS, DENSE_FIRST, ALTERNATING, RECURRING, TWO_WAYS]
)
WORKLOADS = st.builds(
    lambda sequences, prompt, new: Workload.uniform(
        prompt_tokens=prompt, new_tokens=new, num_sequences=sequences
    ),
    st.integers(1, 10**5),
    st.integers(1, 2000),
    st.integers(1, 500),
)
CPU_MACHINES = st.builds(cpu_machine, st.floats(2, 200), disk=st.floats(0.3e9, 8e9))
GPU_MACHINES = st.builds(
    gpu_machine, st.floats(3, 90), st.floats(8, 600), link=st.floats(3e9, 60e9)
)


def allocated(asked: Problem, policy: Policy) -> dict[LevelName, dict[str, int]]:
    """Bytes of experts and of keys and values, added up as stores and engine do it."""
    shape, level_of_all = asked.shape, ("vram" if asked.with_vram else "dram")
    expert = asked.dtypes.expert_bytes(shape)
    held: dict[LevelName, dict[str, int]] = {name: {} for name in ("vram", "dram", "disk")}
    living = asked.placed(policy).residents()
    held[level_of_all][RESIDENT_TERM] = len(living) * expert
    paged = traits_of(policy).is_paged
    slots = 2 * max(streamed_per_layer(shape, living).values()) if paged else policy.num_slots
    held[level_of_all][SLOTS_TERM] = slots * expert
    if asked.with_vram:
        homes = asked.placed(policy).expert_homes()
        held["dram"][RESIDENT_TERM] = len(homes["dram"]) * expert
        held["dram"][SLOTS_TERM] = policy.num_slots * expert * bool(homes["disk"])
    places: set[Place] = {"vram"} if asked.with_vram else {"dram"}
    if not policy.attention_on_gpu:
        places.add("dram")
    layout = KvLayout(levels=policy.kv_levels(shape.num_layers), places=places)

    def bytes_in(layer: int, sequences: int) -> int:
        if layer in shape.recurrent_layers:
            return min(policy.num_kv_pages, policy.batch_size, sequences) * STATE_BYTES
        window = shape.sliding_windows[layer]
        width = shape.attention_of(layer).cache.width
        page = 16 * width * asked.dtypes.compute_bytes
        return pages_in(policy, asked.workload, window, sequences) * page

    kinds = dict[object, list[int]]()
    for layer in range(shape.num_layers):
        kind = "recurrent" if layer in shape.recurrent_layers else shape.attention_of(layer)
        kinds.setdefault(kind, []).append(layer)
    passing = sum(  # a layer of each kind
        max(bytes_in(layer, policy.micro_batch_size) for layer in layers)
        for layers in kinds.values()
    )
    for name in held:
        living_there = [n for n, home in enumerate(layout.levels) if home == name]
        held[name][KV_TERM] = sum(bytes_in(layer, policy.batch_size) for layer in living_there)
        pairs = sum(window.level == name for window in layout.windows)
        held[name][KV_WINDOW_TERM] = pairs * NUM_WINDOWS * passing
    return held


def pages_in(policy: Policy, workload: Workload, window: int | None, sequences: int) -> int:
    """Of a layer for so many of the longest sequences; for a batch, all that admission gives out
    where layers have no windows."""
    most, longest = policy.num_kv_pages, workload.max_total_tokens
    if window is not None and window + 511 < longest:
        return min(most, sequences * pages_of(window + 511))
    return most if sequences == policy.batch_size else min(most, sequences * pages_of(longest))


def assert_priced(asked: Problem, policy: Policy) -> None:
    """At least what is allocated, and little more."""
    for level, terms in allocated(asked, policy).items():
        if level not in asked.hardware.levels:
            continue
        footprint = asked.footprints(policy)[level]
        for term, num_bytes in terms.items():
            priced = footprint.terms.get(term, 0)
            assert num_bytes <= priced <= 1.02 * num_bytes, f"{term} on {level}"


def machines() -> st.SearchStrategy[Hardware]:
    without_disk = st.one_of(CPU_MACHINES, GPU_MACHINES).map(lambda m: m.without("disk"))
    return st.one_of(CPU_MACHINES, GPU_MACHINES, without_disk)


@MANY
@given(machines(), SHAPES, WORKLOADS, st.booleans())
def test_a_planned_policy_is_one_that_runs_and_fits_with_what_is_really_allocated(
    machine: Hardware, shape: ModelShape, workload: Workload, kv_on_disk: bool
) -> None:
    workload = shape.cached(workload)
    asked = problem(machine, shape=shape, workload=workload, kv_on_disk=kv_on_disk)
    try:
        policy = best_policy(asked).policy
    except DoesNotFit:
        return
    for level, footprint in asked.footprints(policy).items():
        assert footprint.total_bytes <= asked.capacity_bytes(level), level
    assert policy.ffn_on_gpu == asked.with_vram
    assert_priced(asked, policy)
    if traits_of(policy).is_paged:
        living = asked.placed(policy).residents()
        assert policy.num_slots == 2 * max(streamed_per_layer(shape, living).values())
    homes = policy.kv_levels(shape.num_layers)
    for level in asked.hardware.levels:
        layers = policy.kv_cache.on(level) * shape.num_layers
        assert layers == pytest.approx(homes.count(level)), "whole layers"


def given_policy(**changes: object) -> Policy:
    usual = {
        "batch_size": 64,
        "micro_batch_size": 16,
        "tokens_per_pass": 256,
        "num_slots": 5,
        "num_kv_pages": 1000,
        "attention_on_gpu": True,
        "ffn_on_gpu": True,
        "weights": Placement(vram=0.23, dram=0.47, disk=0.3),
    }
    return Policy(**{**usual, **changes})


@pytest.mark.parametrize("attention_on_gpu", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_odd_shares_are_priced_as_the_whole_layers_and_experts_that_they_become(
    schedule: str, attention_on_gpu: bool
) -> None:
    asked = problem(gpu_machine())
    caches = [Placement(dram=1), Placement(dram=0.51, disk=0.49), Placement(disk=1)]
    if attention_on_gpu:
        caches += [Placement(vram=1), Placement(vram=0.34, dram=0.33, disk=0.33)]
    for cache in caches:
        policy = given_policy(schedule=schedule, attention_on_gpu=attention_on_gpu, kv_cache=cache)
        assert_priced(asked, policy)


def test_the_cache_of_gpt_oss_is_that_of_its_configuration() -> None:
    """12 layers of all tokens, and 12 of 128 and what a slice adds to them, each 2 x 8 heads x 64
    numbers of 2 bytes: by arithmetic, as planned, and as a cache allocates it."""
    sequences, longest, row = 3, 2000, 2 * 8 * 64 * 2
    asked = problem(
        cpu_machine(),
        shape=ALTERNATING,
        workload=Workload.uniform(prompt_tokens=1900, new_tokens=100),
    )
    policy = given_policy(
        attention_on_gpu=False,
        ffn_on_gpu=False,
        weights=Placement(dram=1),
        batch_size=sequences,
        micro_batch_size=2,
        num_kv_pages=sequences * longest // 16,
    )
    expected = 12 * sequences * longest * row + 12 * sequences * 640 * row
    assert asked.footprints(policy)["dram"].terms[KV_TERM] == expected
    groups = ALTERNATING.cache_groups(longest)
    cache = KVCache(
        groups, num_pages=[group.num_pages(policy) for group in groups], dtype=torch.bfloat16
    )
    assert cache.bytes_on("dram") == expected
    assert expected < 0.67 * 24 * sequences * longest * row


@pytest.mark.parametrize("longest", [1000, 5008])
def test_layers_that_attend_in_two_ways_cache_as_many_bytes_as_their_heads_have(
    longest: int,
) -> None:
    """27 layers of 4,096 bytes a token, at most 1024 + 511 tokens, and 5 of 2,048 of every one."""
    sequences = 3
    policy = given_policy(
        attention_on_gpu=False,
        ffn_on_gpu=False,
        weights=Placement(dram=1),
        batch_size=sequences,
        micro_batch_size=2,
        num_kv_pages=sequences * pages_of(longest),
    )
    asked = problem(
        cpu_machine(),
        shape=TWO_WAYS,
        workload=Workload.uniform(prompt_tokens=longest - 8, new_tokens=8),
    )
    kept = min(longest, 1024 + 511)
    expected = 27 * sequences * 16 * pages_of(kept) * WIDE_ROW
    expected += 5 * sequences * 16 * pages_of(longest) * NARROW_ROW
    assert asked.footprints(policy)["dram"].terms[KV_TERM] == expected
    groups = TWO_WAYS.cache_groups(longest)
    cache = KVCache(
        groups, num_pages=[group.num_pages(policy) for group in groups], dtype=torch.bfloat16
    )
    assert cache.bytes_on("dram") == expected


def test_a_batch_of_states_is_that_of_the_configuration() -> None:
    """24 of 32 layers have a row for each sequence in work, however long these are."""
    policy = given_policy(attention_on_gpu=False, ffn_on_gpu=False, weights=Placement(dram=1))
    for longest in (100, 10_000):
        asked = problem(
            cpu_machine(),
            shape=RECURRING,
            workload=Workload.uniform(prompt_tokens=longest, new_tokens=1),
        )
        expected = 24 * 64 * STATE_BYTES + 8 * 1000 * 16 * (2 * 8 * 128 * 2)
        assert asked.footprints(policy)["dram"].terms[KV_TERM] == expected


@given(
    st.sampled_from([ALTERNATING, SHAPE, RECURRING, *UNLIKE]),
    st.lists(st.floats(0, 1), min_size=2, max_size=2).map(sorted),
    st.integers(1, 64),
    st.integers(1, 1000),
)
@example(SHAPE, [0.078125, 1.0], 1, 1)  # nothing on disk takes what is left of a layer
def test_parts_of_layers_take_no_less_than_the_stretches_that_they_become(
    shape: ModelShape, cuts: list[float], batch: int, pages: int
) -> None:
    """Whatever layers a stretch has more of than the mean, and wherever rounding brings some."""
    asked = problem(
        gpu_machine(),
        shape=shape,
        workload=Workload.uniform(prompt_tokens=3000, new_tokens=100),
    )
    policy = given_policy(
        kv_cache=Placement(vram=cuts[0], dram=cuts[1] - cuts[0], disk=1 - cuts[1]),
        batch_size=batch,
        num_kv_pages=pages,
    )
    in_parts = Division.in_parts(
        shape,
        asked.memory.groups,
        policy,
        ladder=asked.ladder,
        weight_levels=("vram", "dram", "disk"),
        kv_levels=("vram", "dram", "disk"),
    )
    of_parts = asked.footprints(policy, in_parts)
    for level, footprint in asked.footprints(policy).items():
        roomy = of_parts[level].terms
        held = footprint.terms.get(KV_TERM, 0)
        spare = roomy.get(SPARE_TERM, 0) - spare_experts(asked, in_parts, level)
        assert held <= roomy.get(KV_TERM, 0) + spare + 1, level


@pytest.mark.parametrize("name", ["deepseek-v3.2", "switch-base-128"])
def test_where_all_layers_keep_alike_there_is_no_more_of_any_in_a_stretch(name: str) -> None:
    """Be there several things that a layer keeps, or layers before them that keep nothing: a level
    takes what rounding brings down to it, a layer for each level above."""
    shape = load_model(name).shape
    groups = shape.cache_groups(3000)
    in_parts = Division.in_parts(
        shape,
        groups,
        given_policy(),
        ladder=Ladder.of(gpu_machine()),
        weight_levels=("vram", "dram", "disk"),
        kv_levels=("vram", "dram", "disk"),
    )
    for number, level in enumerate(("vram", "dram", "disk")):
        assert in_parts.spare_layers[level] == pytest.approx([number] * len(groups))


def spare_experts(asked: Problem, division: Division, level: LevelName) -> float:
    """Bytes of the spare experts of a level; those on disk stay in the checkpoint."""
    if level == "disk":
        return 0.0
    packed = packed_bytes if level == "vram" else slot_bytes
    return division.spare_experts.get(level, 0) * packed(asked.shape, asked.dtypes)


def test_residents_leave_every_layer_with_about_as_many_to_stream() -> None:
    ladder = Ladder(("disk", "dram", "vram"))
    for share in (0, 0.003, 0.1, 1 / 3, 0.99, 1):
        policy = given_policy(weights=Placement(vram=share, dram=1 - share))
        living = PlacedModel(DENSE_FIRST, policy, ladder).residents()
        streamed = streamed_per_layer(DENSE_FIRST, living)
        assert most_streamed(DENSE_FIRST, len(living)) == max(streamed.values())


def vram(policy: Policy, machine: Hardware | None = None) -> Footprint:
    return problem(machine or gpu_machine()).footprints(policy)["vram"]


def dram(policy: Policy, machine: Hardware | None = None) -> Footprint:
    return problem(machine or gpu_machine()).footprints(policy)["dram"]


def test_a_window_is_there_as_soon_as_one_layer_is_not_where_it_attends() -> None:
    all_above = given_policy(kv_cache=Placement(vram=1))
    one_below = given_policy(kv_cache=Placement(vram=31 / 32, dram=1 / 32))
    assert KV_WINDOW_TERM not in vram(all_above).terms
    of_all = vram(given_policy(kv_cache=Placement(dram=1))).terms[KV_WINDOW_TERM]
    assert vram(one_below).terms[KV_WINDOW_TERM] == of_all


def test_prompts_need_a_window_on_the_gpu_where_decoding_attends_in_main_memory() -> None:
    policy = given_policy(attention_on_gpu=False, kv_cache=Placement(dram=1))
    assert KV_WINDOW_TERM in vram(policy).terms and KV_WINDOW_TERM not in dram(policy).terms
    on_disk = replace(policy, kv_cache=Placement(disk=1))
    window = vram(on_disk).terms[KV_WINDOW_TERM]
    assert dram(on_disk).terms[KV_WINDOW_TERM] == 2 * window, "one for either place"


def test_experts_of_main_memory_need_no_second_copy_there_and_those_of_the_disk_pass_slots() -> (
    None
):
    none_on_disk = given_policy(weights=Placement(vram=0.2, dram=0.8))
    assert not {SLOTS_TERM, "staging"} & set(dram(none_on_disk).terms)
    assert dram(given_policy()).terms[SLOTS_TERM] >= 5 * 3 * 4096 * 14336 * 2


@pytest.mark.parametrize(
    ("batch_size", "vocab_size", "logits"),
    [(40, 4000, 40 * 4000), (1, 152_000, 152_000), (512, 152_000, SAMPLING_LOGITS)],
)
def test_choosing_from_few_logits_takes_less_than_from_as_many_as_are_chosen_from_at_a_time(
    batch_size: int, vocab_size: int, logits: int
) -> None:
    asked = problem(gpu_machine()).memory
    memory = replace(asked, shape=replace(asked.shape, vocab_size=vocab_size))
    assert not memory.workload.takes_likeliest
    policy = given_policy(batch_size=batch_size, micro_batch_size=1, tokens_per_pass=batch_size)
    (sampling,) = (each for each in memory.buffers(policy) if each.name == "sampling")
    assert sampling.num_bytes == pytest.approx(88 * 2**20 * logits / SAMPLING_LOGITS)


def test_pages_are_staged_only_where_the_policy_says_so() -> None:
    direct = given_policy(schedule="cgopipe", weights=Placement(vram=0.25, dram=0.75))
    staged = replace(direct, staging=True)
    assert dram(staged).terms["staging"] == pytest.approx(6 * 3 * 4096 * 14336 * 2, rel=0.01)
    assert "staging" not in dram(direct).terms
