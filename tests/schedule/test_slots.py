"""What a queue of slots promises, beside what the properties of timelines show."""

from collections.abc import Collection, Iterator
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.schedule.request import Arriving
from moebatch.schedule.slots.cache import Rule, make_cache
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.slots.slots import SlotQueue

KEYS = [ExpertKey(layer, expert) for layer in range(2) for expert in range(4)]
RULES: tuple[Rule, ...] = get_args(Rule)


def queue(num_slots: int, **options: object) -> SlotQueue:
    return SlotQueue(dict.fromkeys(KEYS, 2), num_slots=num_slots, **options)


def bring(slots: SlotQueue, key: ExpertKey) -> None:
    while not slots.is_ready(key):
        chunk = slots.next_chunk()
        assert chunk is not None
        slots.finish_chunk(chunk)
        slots.check_integrity()


def come(slots: SlotQueue, key: ExpertKey) -> None:
    slots.require(key)
    bring(slots, key)


def test_a_required_expert_waits_for_one_chunk_of_an_prefetched_one() -> None:
    slots = queue(2)
    slots.prefetch([KEYS[0], KEYS[1]])
    first = slots.next_chunk()
    slots.require(KEYS[2])
    assert first is not None and first.load.key == KEYS[0]
    second = slots.next_chunk()
    assert second is not None and second.load.key == KEYS[2]


def test_a_required_expert_takes_the_slot_of_the_prefetched_one_that_is_needed_last() -> None:
    slots = queue(2)
    slots.prefetch([KEYS[0], KEYS[1]])
    bring(slots, KEYS[1])
    come(slots, KEYS[2])
    assert slots.holds(KEYS[0]) and not slots.holds(KEYS[1])


def test_an_expert_that_is_still_needed_is_never_evicted() -> None:
    slots = queue(1)
    come(slots, KEYS[0])
    slots.require(KEYS[1])
    assert slots.next_chunk() is None
    slots.use(KEYS[0])
    assert slots.next_chunk() is None
    slots.finish(KEYS[0], keep=False)
    bring(slots, KEYS[1])


def test_prefetched_experts_that_nobody_wants_are_dropped_and_their_slots_free() -> None:
    slots = queue(3)
    slots.prefetch(KEYS[:3])
    in_flight = slots.next_chunk()
    slots.require(KEYS[1])
    slots.withdraw(0)
    assert in_flight is not None
    slots.finish_chunk(in_flight)
    slots.check_integrity()
    assert [slots.holds(key) for key in KEYS[:3]] == [False, True, False]


def test_no_more_experts_are_prefetched_than_there_are_slots() -> None:
    slots = queue(2)
    slots.prefetch(KEYS[:4])
    assert [slots.holds(key) for key in KEYS[:4]] == [True, True, False, False]


def test_experts_that_came_for_nothing_give_their_slots_back_when_their_step_is_over() -> None:
    slots = queue(2)
    slots.prefetch(KEYS[:2])
    bring(slots, KEYS[1])
    slots.release(0)
    assert not any(map(slots.holds, KEYS[:2]))
    slots.prefetch(KEYS[4:6])
    for key in KEYS[4:6]:
        bring(slots, key)


def test_a_lost_chunk_makes_its_expert_come_anew() -> None:
    slots = queue(1)
    slots.require(KEYS[0])
    chunk = slots.next_chunk()
    assert chunk is not None
    slots.lose_chunk(chunk)
    slots.check_integrity()
    assert not slots.holds(KEYS[0])
    slots.forget()
    come(slots, KEYS[0])


def test_a_resident_with_a_lost_chunk_comes_anew_into_its_own_slot() -> None:
    slots = queue(0, resident=[KEYS[0]])
    sent = slots.next_chunk(), slots.next_chunk()
    for chunk in sent:
        assert chunk is not None
        slots.lose_chunk(chunk)
        slots.check_integrity()
    assert numbers_until_it_is_there(slots, KEYS[0]) == [0, 1]


def numbers_until_it_is_there(slots: SlotQueue, key: ExpertKey) -> list[int]:
    """Chunks of an expert that come next, by number."""
    numbers = []
    while not slots.is_ready(key):
        chunk = slots.next_chunk()
        assert chunk is not None and chunk.load.key == key
        numbers.append(chunk.number)
        slots.finish_chunk(chunk)
    return numbers


def test_an_expert_with_a_lost_chunk_is_not_there_when_its_other_chunks_have_arrived() -> None:
    slots = queue(1)
    slots.require(KEYS[0])
    lost, other = slots.next_chunk(), slots.next_chunk()
    assert lost is not None and other is not None
    slots.lose_chunk(lost)
    slots.require(KEYS[0])
    slots.finish_chunk(other)
    assert numbers_until_it_is_there(slots, KEYS[0]) == [0, 1]


def test_nothing_has_a_claim_to_its_slot_after_a_pass_that_was_given_up() -> None:
    """What had come in part goes on, behind what is required then."""
    slots = queue(4)
    come(slots, KEYS[0])
    slots.use(KEYS[0], is_last=True)
    slots.prefetch(KEYS[:1])
    slots.require(KEYS[1])
    begun = slots.next_chunk()
    assert begun is not None
    slots.finish_chunk(begun)
    slots.prefetch(KEYS[2:4])
    slots.forget()
    slots.check_integrity()
    slots.prefetch(KEYS[4:5])
    assert not slots.holds(KEYS[4])
    slots.require(KEYS[6])
    sent = [slots.next_chunk() for _ in range(5)]
    assert [chunk and (chunk.load.key, chunk.number) for chunk in sent] == [
        *((KEYS[6], number) for number in range(2)),
        (KEYS[1], 1),
        *((KEYS[2], number) for number in range(2)),
    ]
    for chunk in sent:
        assert chunk is not None
        slots.finish_chunk(chunk)
    for key in (KEYS[5], KEYS[7], KEYS[4]):
        come(slots, key)
    assert not slots.holds(KEYS[0])


def test_what_was_wanted_again_by_a_pass_that_was_given_up_leaves_when_its_step_is_over() -> None:
    slots = queue(2)
    come(slots, KEYS[0])
    slots.use(KEYS[0])
    slots.prefetch(KEYS[:1])
    slots.forget()
    slots.release(0)
    assert not slots.holds(KEYS[0])


def test_an_expert_that_is_wanted_again_while_it_is_computed_stays_once() -> None:
    slots = queue(2)
    come(slots, KEYS[0])
    slots.use(KEYS[0], is_last=True)
    slots.prefetch(KEYS[:1])
    slots.finish(KEYS[0], keep=False)
    assert slots.is_ready(KEYS[0])
    slots.prefetch(KEYS[4:6])  # its slot is taken again
    assert [slots.holds(key) for key in KEYS[4:6]] == [True, False]
    slots.use(KEYS[0])
    slots.finish(KEYS[0], keep=False)
    assert not slots.holds(KEYS[0])


def test_an_expert_that_is_required_again_while_it_is_computed_is_not_given_up() -> None:
    slots = queue(1)
    come(slots, KEYS[0])
    slots.use(KEYS[0])
    slots.require(KEYS[0])
    slots.finish(KEYS[0], keep=True)
    slots.require(KEYS[1])
    assert slots.next_chunk() is None


def test_an_expert_that_is_still_computed_when_its_step_is_over_leaves_afterwards() -> None:
    slots = queue(1)
    compute(slots, KEYS[0], keep=True)
    slots.use(KEYS[0])
    slots.release(0)
    assert slots.holds(KEYS[0])
    slots.finish(KEYS[0], keep=False)
    assert not slots.holds(KEYS[0])


def test_experts_are_prefetched_for_slots_that_will_be_free_by_then() -> None:
    """Of what is required, and of what is being computed for the last time."""
    slots = queue(2)
    come(slots, KEYS[0])
    slots.use(KEYS[0])
    slots.require(KEYS[1])
    slots.prefetch(KEYS[4:6])
    assert [slots.holds(key) for key in KEYS[4:6]] == [True, False]
    slots.finish(KEYS[0], keep=True)
    slots.use(KEYS[0], is_last=True)
    slots.prefetch(KEYS[5:7])
    assert [slots.holds(key) for key in KEYS[4:7]] == [True, True, False]


def test_required_experts_come_in_their_order_however_often_they_are_asked_for() -> None:
    slots = queue(3)
    slots.prefetch(KEYS[:2])
    for key in (KEYS[1], KEYS[2], KEYS[1], KEYS[2]):
        slots.require(key)
        slots.check_integrity()
    assert [chunk.load.key for _ in range(6) if (chunk := slots.next_chunk())] == [
        key for key in (KEYS[1], KEYS[2], KEYS[0]) for _ in range(2)
    ]


def test_what_nothing_goes_on_without_comes_first_and_no_chunk_of_it_twice() -> None:
    slots = queue(2)
    for key in KEYS[:3]:
        slots.require(key)
    slots.hurry(KEYS[2])
    slots.check_integrity()
    sent = [slots.next_chunk(), slots.next_chunk()]
    assert [chunk and (chunk.load.key, chunk.number) for chunk in sent] == [
        (KEYS[2], 0),
        (KEYS[2], 1),
    ]
    slots.hurry(KEYS[2])
    slots.check_integrity()
    following = slots.next_chunk()
    assert following is not None and following.load.key == KEYS[0]


def test_what_nothing_goes_on_without_takes_the_slot_of_another_required_expert() -> None:
    """That one comes again, from its first chunk on."""
    slots = queue(1)
    for key in KEYS[:3]:
        slots.require(key)
    bring(slots, KEYS[0])
    assert slots.next_chunk() is None
    slots.hurry(KEYS[2])
    bring(slots, KEYS[2])
    assert slots.next_chunk() is None
    for key in (KEYS[2], KEYS[1]):
        bring(slots, key)
        slots.use(key)
        slots.finish(key, keep=False)
    assert numbers_until_it_is_there(slots, KEYS[0]) == [0, 1]


def test_no_slot_is_taken_that_is_being_computed_with_or_filled() -> None:
    slots = queue(1)
    compute(slots, KEYS[0], keep=True)
    slots.use(KEYS[0])
    slots.require(KEYS[1])
    assert slots.next_chunk() is None, "it is kept, and computed once more"
    slots.require(KEYS[0])
    slots.hurry(KEYS[1])
    assert slots.next_chunk() is None, "it is required again as well"
    slots.finish(KEYS[0], keep=False)
    on_its_way = slots.next_chunk()
    assert on_its_way is not None and on_its_way.load.key == KEYS[1]
    slots.require(KEYS[2])
    slots.hurry(KEYS[2])
    other = slots.next_chunk()
    assert other is not None and other.load.key == KEYS[1]
    slots.finish_chunk(on_its_way)
    assert slots.next_chunk() is None, "a chunk is on its way into it"
    slots.finish_chunk(other)
    bring(slots, KEYS[2])


def test_of_prefetched_experts_one_leaves_that_no_chunk_is_on_its_way_to() -> None:
    slots = queue(2)
    slots.prefetch(KEYS[:2])
    bring(slots, KEYS[0])
    begun = slots.next_chunk()
    assert begun is not None and begun.load.key == KEYS[1]
    slots.require(KEYS[2])
    sent = slots.next_chunk()
    assert sent is not None and sent.load.key == KEYS[2]
    assert [slots.holds(key) for key in KEYS[:2]] == [False, True]


def test_what_cannot_be_had_from_below_keeps_nobody_waiting() -> None:
    slots = queue(2)
    for key in KEYS[:2]:
        slots.require(key)
    sent = slots.next_chunk(lambda load: load.key != KEYS[0])
    assert sent is not None and sent.load.key == KEYS[1]


def test_what_its_layer_keeps_makes_no_room_for_others() -> None:
    slots = queue(1, cache=make_cache({0: 1}, "lru"))
    come(slots, KEYS[4])
    compute(slots, KEYS[0])
    compute(slots, KEYS[0], keep=True)
    slots.require(KEYS[5])
    assert slots.next_chunk() is None
    slots.require(KEYS[0])
    slots.hurry(KEYS[5])
    bring(slots, KEYS[5])
    assert slots.is_ready(KEYS[0]) and not slots.is_ready(KEYS[4])


def test_of_slots_that_are_shared_the_one_that_is_awaited_takes_any() -> None:
    slots = queue(1, cache=make_cache({0: 1}, "foreseen"))
    for key in KEYS[:2]:
        compute(slots, key)
    for key in KEYS[:3]:
        slots.require(key)
    assert slots.next_chunk() is None
    slots.hurry(KEYS[2])
    bring(slots, KEYS[2])


def test_nobody_leaves_while_a_slot_is_free() -> None:
    slots = queue(1, cache=make_cache({0: 1}, "foreseen"))
    compute(slots, KEYS[0])
    slots.cache.expect(0, [0.1, 0.2, 0.3, 0.9])
    slots.prefetch(KEYS[3:4])
    bring(slots, KEYS[3])
    assert slots.holds(KEYS[0])


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_what_the_cache_gives_up_stays_if_it_is_wanted_again(is_withdrawn: bool) -> None:
    slots = queue(2, cache=make_cache({0: 1}, "lru"))
    compute(slots, KEYS[0])
    slots.prefetch(KEYS[:1])
    if is_withdrawn:
        slots.withdraw(0)
    compute(slots, KEYS[1])
    assert slots.holds(KEYS[0]) != is_withdrawn


def test_experts_come_back_resident_first_then_as_they_arrived() -> None:
    slots = queue(3, resident=[KEYS[3]])
    slots.fill_residents()
    for key in (KEYS[2], KEYS[0]):
        come(slots, key)
    assert slots.ready(KEYS[:4]) == [KEYS[3], KEYS[2], KEYS[0]]
    assert [slots.state(key) for key in KEYS[:4]] == ["arrived", "absent", "arrived", "resident"]


def compute(slots: SlotQueue, key: ExpertKey, *, keep: bool = False) -> bool:
    """Whether it was there."""
    was_there = slots.is_ready(key)
    come(slots, key)
    slots.use(key)
    slots.finish(key, keep=keep)
    slots.check_integrity()
    return was_there


def residents(slots: SlotQueue) -> list[ExpertKey]:
    return [key for key in KEYS if slots.state(key) == "resident"]


def test_arrivals_are_told_in_order_from_any_number_on_each_expert_once() -> None:
    slots = queue(len(KEYS))
    for round_ in range(5):
        before = slots.num_arrived
        for key in KEYS:
            slots.require(key)
        for place, key in enumerate(KEYS):
            bring(slots, key)
            assert slots.arrived_after(before) == KEYS[: place + 1]
            assert slots.arrived_after(slots.num_arrived) == []
        for key in KEYS:
            slots.use(key)
            slots.finish(key, keep=False)
        assert slots.num_arrived == (round_ + 1) * len(KEYS)
    assert slots.arrived_after(0) == KEYS


def test_an_arrival_is_told_of_however_many_have_come_and_gone_since() -> None:
    slots = queue(2)
    come(slots, KEYS[0])
    for _ in range(3 * len(KEYS)):
        compute(slots, KEYS[1])
    assert slots.arrived_after(0) == KEYS[:2]


def test_experts_that_arrive_one_by_one_are_not_looked_for_among_all_that_are_left() -> None:
    asked_for_all: list[bool] = []
    come: list[ExpertKey] = []

    def ready(waiting: Collection[ExpertKey], of_all: bool) -> list[ExpertKey]:
        asked_for_all.append(of_all)
        return [come.pop()] if come else []

    keys = iter(KEYS[:4])
    arriving = Arriving(KEYS[:4], ready, lambda waiting: come.append(next(keys)))
    assert list(arriving) == [0, 1, 2, 3]
    assert asked_for_all.count(True) == 1


def test_what_a_schedule_has_not_taken_is_handed_out_when_it_asks_again() -> None:
    waits = iter([])

    def ready(waiting: Collection[ExpertKey], of_all: bool) -> list[ExpertKey]:
        return list(waiting) if of_all else []

    arriving = Arriving(KEYS[:3], ready, lambda waiting: next(waits))
    assert next(iter(arriving)) == 0
    assert list(arriving) == [1, 2]


def test_an_expert_stays_in_a_slot_that_was_added_and_is_never_sent_again() -> None:
    slots = queue(1)
    compute(slots, KEYS[0])
    assert not slots.holds(KEYS[0])
    assert slots.grow() == 1
    compute(slots, KEYS[1])
    assert residents(slots) == [KEYS[1]]
    for key in (KEYS[2], KEYS[3], KEYS[5]):
        compute(slots, key)
    slots.require(KEYS[1])
    assert slots.next_chunk() is None
    assert residents(slots) == [KEYS[1]]
    assert slots.num_streaming_slots == 1


def test_layers_take_turns_in_keeping_experts() -> None:
    slots = queue(1, resident=[KEYS[0]])
    slots.fill_residents()
    for _ in range(3):
        slots.grow()
    for key in KEYS[1:]:
        compute(slots, key)
    assert residents(slots) == [KEYS[0], KEYS[4], KEYS[5], *residents(slots)[3:]]
    compute(slots, KEYS[1])
    assert residents(slots) == [KEYS[0], KEYS[1], KEYS[4], KEYS[5]]


def test_a_layer_that_is_not_chosen_any_more_does_not_keep_a_slot_waiting() -> None:
    slots = queue(1, resident=[KEYS[0]])
    slots.fill_residents()
    slots.grow()
    for _ in range(4):
        for key in KEYS[1:4]:
            compute(slots, key)
    assert len(residents(slots)) == 2


@pytest.mark.parametrize("rule", RULES)
def test_the_cache_has_room_again_for_what_has_become_resident(rule: Rule) -> None:
    slots = queue(2, cache=make_cache({0: 1}, rule))
    compute(slots, KEYS[0])
    slots.grow()
    compute(slots, KEYS[0])
    assert residents(slots) == [KEYS[0]]
    compute(slots, KEYS[1])
    slots.check_integrity()
    assert slots.holds(KEYS[1])


def test_an_expert_that_several_use_stays_for_all_of_them() -> None:
    slots = queue(2)
    come(slots, KEYS[0])
    slots.use(KEYS[0])
    slots.use(KEYS[0])
    slots.grow()
    for keep in (True, False):
        slots.finish(KEYS[0], keep=keep)
        slots.release(0)
        slots.withdraw(0)
        slots.check_integrity()
    assert residents(slots) == [KEYS[0]]


def test_slots_grow_until_all_experts_have_one() -> None:
    slots = queue(1, resident=KEYS[:6])
    slots.fill_residents()
    slots.grow()
    slots.grow()
    assert not slots.can_grow
    for key in KEYS[6:]:
        compute(slots, key)
    assert residents(slots) == KEYS


def move(slots: SlotQueue, *, is_lost: bool) -> None:
    """The next chunk arrives, or does not."""
    chunk = slots.next_chunk()
    if chunk is not None:
        (slots.lose_chunk if is_lost else slots.finish_chunk)(chunk)


def do(slots: SlotQueue, what: str, key: ExpertKey) -> None:
    match what:
        case "compute" | "keep":
            compute(slots, key, keep=what == "keep")
        case "grow" if slots.can_grow:
            slots.grow()
        case "release":
            slots.release(key.layer)
        case "prefetch":
            slots.prefetch([key])
        case "withdraw":
            slots.withdraw(key.layer)
        case "arrive" | "lose":
            move(slots, is_lost=what == "lose")
        case "forget":
            slots.forget()


DEEDS = ["compute", "keep", "grow", "release", "prefetch", "withdraw", "arrive", "lose", "forget"]


@given(
    st.sets(st.sampled_from(KEYS), max_size=len(KEYS) - 1),
    st.sampled_from(RULES),
    st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from(DEEDS), st.sampled_from(KEYS)), max_size=30),
)
def test_what_is_counted_on_the_way_is_what_there_is(
    resident: set[ExpertKey], rule: Rule, cached: int, deeds: list[tuple[str, ExpertKey]]
) -> None:
    cache = make_cache({0: cached, 1: cached}, rule)
    slots = queue(2, resident=sorted(resident), cache=cache)
    left, num_seen = dict.fromkeys(KEYS), 0
    for what, key in deeds:
        do(slots, what, key)
        slots.check_integrity()
        come = [key for key in slots.arrived_after(num_seen) if key in left]
        assert {*slots.ready(come)} == {*slots.ready(left)}, "found among those that came since"
        if what in ("arrive", "compute"):  # all that is ready is handed out
            num_seen = slots.num_arrived
            for ready in slots.ready(left):
                del left[ready]


class Walked(dict[ExpertKey, int]):
    """Experts of a model, which counts how often all of them are gone through."""

    num_walks = 0

    def __iter__(self) -> Iterator[ExpertKey]:
        self.num_walks += 1
        return super().__iter__()


def test_no_expert_that_is_computed_has_the_whole_model_gone_through() -> None:
    model = Walked(dict.fromkeys(KEYS, 1))
    slots = SlotQueue(model, num_slots=1, resident=[KEYS[0]])
    slots.grow()
    slots.grow()
    num_walks = model.num_walks
    for key in KEYS[1:]:
        slots.require(key)
        while not slots.is_ready(key):
            move(slots, is_lost=False)
        slots.use(key)
        slots.finish(key, keep=False)
    assert model.num_walks == num_walks
