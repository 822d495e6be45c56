"""What schedules and their simulation learn of a policy."""

import pytest

from moebatch.layout.ladder import Ladder
from moebatch.layout.placed import PlacedModel, spread, streamed_per_layer
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.policy.policy import Placement, Policy
from tests.plan.problems import SHAPE

EXPERT = 352_321_536
CPU, GPU = Ladder(("disk", "dram")), Ladder(("disk", "dram", "vram"))
STAGING = Ladder(GPU.levels, stages=True)


def policy(
    schedule: str = "klotski",
    *,
    slots: int = 6,
    num_hot: int | None = None,
    weights: Placement | None = None,
    kv_cache: Placement | None = None,
    attention_on_gpu: bool = True,
) -> Policy:
    return Policy(
        batch_size=64,
        micro_batch_size=16,
        tokens_per_pass=64,
        num_slots=slots,
        num_kv_pages=64,
        weights=weights or Placement(vram=0.25, dram=0.75),
        kv_cache=kv_cache or Placement(vram=1),
        attention_on_gpu=attention_on_gpu,
        ffn_on_gpu=True,
        schedule=schedule,
        num_hot=num_hot,
    )


def test_every_schedule_is_found_by_its_own_name() -> None:
    assert list(SCHEDULES) == [one.name for one in SCHEDULES.values()]


@pytest.mark.parametrize(
    ("slots", "num_hot", "hot", "depth"),
    [(6, None, 8, 1), (16, None, 8, 2), (6, 2, 2, 3), (7, 2, 2, 4), (6, 0, 0, 6), (6, 99, 8, 1)],
)
def test_as_many_steps_ahead_as_slots_can_hold(
    slots: int, num_hot: int | None, hot: int, depth: int
) -> None:
    setup = PlacedModel(SHAPE, policy(slots=slots, num_hot=num_hot), GPU).setup()
    assert (setup.num_hot, setup.depth) == (hot, depth)


def test_never_further_ahead_than_round_the_model() -> None:
    assert PlacedModel(SHAPE, policy(slots=999, num_hot=1), GPU).setup().depth == 31


def test_caches_have_homes_only_where_something_has_to_move() -> None:
    def homes(kv_cache: Placement, ladder: Ladder = GPU, *, on_gpu: bool = True) -> object:
        under = policy(kv_cache=kv_cache, attention_on_gpu=on_gpu)
        return PlacedModel(SHAPE, under, ladder).setup().kv_homes

    assert homes(Placement(vram=1)) == ()
    assert homes(Placement(dram=1), CPU) == ()
    # Prompts attend on the GPU even where decoding sequences do not.
    assert homes(Placement(dram=1), on_gpu=False) == ("dram",) * 32
    assert homes(Placement(vram=1), on_gpu=False) == ("vram",) * 32
    assert homes(Placement(vram=0.5, dram=0.5)) == ("vram",) * 16 + ("dram",) * 16


def test_residents_are_spread_evenly_over_the_layers() -> None:
    room = PlacedModel(SHAPE, policy(), GPU).room(expert_bytes=EXPERT)
    assert set(streamed_per_layer(SHAPE, room.resident).values()) == {6}
    assert room.resident_below is None
    assert room.num_slots_below == 0
    assert spread(["a", "b", "c", "d"], 2) == ["a", "c"]


def test_experts_on_disk_pass_through_main_memory() -> None:
    under = policy(weights=Placement(vram=0.25, dram=0.25, disk=0.5), slots=9)
    room = PlacedModel(SHAPE, under, GPU).room(expert_bytes=EXPERT)
    assert room.resident_below is not None
    assert len(room.resident_below) == 256 - 128
    assert room.resident <= room.resident_below
    assert room.num_slots_below == 9
    assert PlacedModel(SHAPE, under, GPU).setup().window == 2
    assert PlacedModel(SHAPE, policy(), GPU).setup().window == 0


def test_without_a_gpu_the_disk_is_the_level_below() -> None:
    under = policy(weights=Placement(dram=0.5, disk=0.5), kv_cache=Placement(dram=1))
    room = PlacedModel(SHAPE, under, CPU).room(expert_bytes=EXPERT)
    assert len(room.resident) == 128
    assert room.resident_below is None
    setup = PlacedModel(SHAPE, under, CPU).setup()
    assert (setup.compute, setup.window) == ("dram", 0)


@pytest.mark.parametrize(("expert_bytes", "chunks"), [(1, 1), (2**24, 1), (2**25, 2), (2**33, 8)])
def test_experts_come_in_pieces_of_sixteen_mib_but_not_in_many(
    expert_bytes: int, chunks: int
) -> None:
    room = PlacedModel(SHAPE, policy(), GPU).room(expert_bytes=expert_bytes)
    assert room.num_chunks == chunks


def test_only_pages_have_a_lane_for_staging() -> None:
    for schedule, staged in (("klotski", False), ("cgopipe", True)):
        under = policy(schedule)  # type: ignore[arg-type]
        assert PlacedModel(SHAPE, under, STAGING).setup().has_staging == staged


@pytest.mark.parametrize(
    ("schedule", "num_hot", "wanted"),
    [
        ("cgopipe", None, 12),
        ("multi", None, 12),
        ("hot", 2, 8),
        ("hot", None, 12),
        ("klotski", 2, 2),
    ],
)
def test_schedules_want_as_many_slots_as_their_way_of_working_takes(
    schedule: str, num_hot: int | None, wanted: int
) -> None:
    assert PlacedModel(SHAPE, policy(schedule, num_hot=num_hot), GPU).slots_wanted == wanted
