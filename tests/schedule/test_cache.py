"""Which experts stay after they have been computed, and what foreseeing them was worth."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.schedule.drivers.foresight import Foresight
from moebatch.schedule.slots.cache import Rule, make_cache
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from tests.schedule.test_slots import KEYS, bring, compute

EXPERTS = 4


def queue(rule: Rule, size: int, *, num_slots: int = 1) -> SlotQueue:
    cache = make_cache(dict.fromkeys((0, 1), size), rule)
    return SlotQueue(dict.fromkeys(KEYS, 2), num_slots=num_slots, cache=cache)


def hits(slots: SlotQueue, experts: Iterable[int], layer: int = 0) -> int:
    return sum(compute(slots, ExpertKey(layer, expert)) for expert in experts)


@pytest.mark.parametrize(("rule", "expected"), [("lru", 0), ("lfu", 2), ("lifo", 2)])
def test_where_every_expert_is_used_in_turn_only_lru_keeps_nothing(
    rule: Rule, expected: int
) -> None:
    slots = queue(rule, 2)
    hits(slots, range(EXPERTS))
    for _ in range(3):
        assert hits(slots, range(EXPERTS)) == expected


def test_lru_keeps_what_was_used_last() -> None:
    slots = queue("lru", 2)
    hits(slots, [0, 1, 0, 2])
    assert [slots.holds(key) for key in KEYS[:4]] == [True, False, True, False]


def test_lfu_keeps_what_is_used_often() -> None:
    slots = queue("lfu", 2)
    hits(slots, [0, 0, 1, 2, 2, 3])
    assert [slots.holds(key) for key in KEYS[:4]] == [True, False, True, False]


def test_layers_do_not_take_each_others_places() -> None:
    slots = queue("lru", 2)
    hits(slots, [0, 1])
    hits(slots, range(EXPERTS), layer=1)
    assert hits(slots, [0, 1]) == 2


def test_what_came_for_nothing_does_not_stay() -> None:
    slots = queue("lru", 2, num_slots=2)
    slots.prefetch([KEYS[0], KEYS[1]])
    for key in KEYS[:2]:
        bring(slots, key)
    slots.withdraw(0)
    assert not slots.holds(KEYS[0]) and not slots.holds(KEYS[1])


def test_an_expert_that_is_likely_next_does_not_leave_for_another() -> None:
    slots = queue("lru", 1)
    hits(slots, [0])
    slots.prefetch([KEYS[0]])
    hits(slots, [1])
    assert slots.is_ready(KEYS[0]) and slots.is_ready(KEYS[1])
    assert hits(slots, [0]) == 1
    slots.withdraw(0)
    hits(slots, [2])
    assert sum(slots.holds(key) for key in KEYS[:4]) == 1


def test_an_expert_that_is_used_batch_by_batch_counts_as_used_once_its_step_is_over() -> None:
    slots = queue("lru", 1)
    compute(slots, KEYS[0], keep=True)
    compute(slots, KEYS[0], keep=True)
    slots.release(0)
    slots.check_integrity()
    assert slots.state(KEYS[0]) == "resident"


def shared(*held: ExpertKey, chances: dict[int, tuple[float, ...]]) -> SlotQueue:
    """Slots that go by chances and are full."""
    slots = SlotQueue(
        dict.fromkeys(KEYS, 2),
        num_slots=1,
        cache=make_cache({0: len(held) - 1}, "foreseen"),
    )
    for key in held:
        compute(slots, key)
    for layer, chances_E in chances.items():
        slots.cache.expect(layer, chances_E)
    return slots


def test_the_least_likely_of_all_layers_leaves_for_what_a_gate_has_chosen() -> None:
    likely = {0: (0.3, 0.1, 0, 0), 1: (0.2, 0.9, 0, 0)}
    slots = shared(KEYS[0], KEYS[1], KEYS[4], KEYS[5], chances=likely)
    hits(slots, [2])
    assert [slots.holds(key) for key in KEYS[:6]] == [True, False, True, False, True, True]


def test_the_least_likely_leaves_for_what_is_foreseen_only_if_that_is_likelier() -> None:
    slots = shared(KEYS[0], KEYS[1], chances={0: (0.3, 0.5, 0.2, 0.4)})
    slots.prefetch([KEYS[2]])
    assert slots.next_chunk() is None
    slots.withdraw(0)
    slots.prefetch([KEYS[3]])
    bring(slots, KEYS[3])
    assert [slots.holds(key) for key in KEYS[:4]] == [False, True, False, True]


def test_what_came_for_nothing_stays_as_long_as_it_is_likelier_than_others() -> None:
    slots = shared(KEYS[0], KEYS[4], chances={0: (0.1, 0.6, 0, 0), 1: (0.5, 0, 0, 0)})
    slots.prefetch([KEYS[1]])
    bring(slots, KEYS[1])
    slots.withdraw(0)
    slots.check_integrity()
    assert slots.state(KEYS[1]) == "resident"
    slots.cache.expect(0, (0, 0.2, 0, 0))
    hits(slots, [1], layer=1)
    assert slots.holds(KEYS[4]) and not slots.holds(KEYS[1])


def test_of_equal_chances_the_layer_that_was_just_computed_gives_way() -> None:
    slots = shared(KEYS[0], KEYS[4], chances={0: (1, 1, 1, 1), 1: (1, 1, 1, 1)})
    hits(slots, [1], layer=1)
    assert slots.holds(KEYS[0]) and not slots.holds(KEYS[4])


def test_of_equal_chances_what_is_foreseen_comes_if_its_turn_is_earlier() -> None:
    alike = {0: (1, 1, 1, 1), 1: (1, 1, 1, 1)}
    slots = shared(KEYS[0], KEYS[4], chances=alike)  # layer 0 is next
    slots.prefetch([KEYS[1]])
    bring(slots, KEYS[1])
    assert slots.holds(KEYS[0]) and not slots.holds(KEYS[4])
    slots = shared(KEYS[4], KEYS[0], chances=alike)
    slots.withdraw(0)
    slots.prefetch([KEYS[1]])
    assert slots.next_chunk() is None


def test_what_came_for_nothing_does_not_put_off_the_turn_of_its_layer() -> None:
    alike = {0: (1, 1, 1, 1), 1: (1, 1, 1, 1)}
    slots = shared(KEYS[0], KEYS[4], KEYS[5], chances=alike)  # layer 0 is next
    slots.prefetch([KEYS[1]])
    bring(slots, KEYS[1])
    slots.withdraw(0)
    slots.prefetch([KEYS[2]])
    bring(slots, KEYS[2])
    assert [slots.holds(key) for key in (KEYS[0], KEYS[1], KEYS[4], KEYS[5])] == [1, 1, 0, 0]


def test_what_is_going_to_be_computed_does_not_leave_however_unlikely_it_was() -> None:
    slots = shared(KEYS[0], KEYS[1], chances={0: (0, 0.9, 0, 0)})
    slots.require(KEYS[0])
    slots.require(KEYS[2])
    bring(slots, KEYS[2])
    assert slots.holds(KEYS[0]) and not slots.holds(KEYS[1])


@given(
    st.sampled_from(["lru", "lfu", "lifo", "foreseen"]),
    st.integers(0, EXPERTS),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(KEYS), st.booleans(), st.floats(0, 1)), max_size=40),
)
def test_books_are_kept_whatever_is_used(
    rule: Rule, size: int, num_slots: int, uses: list[tuple[ExpertKey, bool, float]]
) -> None:
    slots = queue(rule, size, num_slots=num_slots)
    for key, is_foreseen, chance in uses:
        slots.cache.expect(key.layer, [chance if e == key.expert else 0.5 for e in range(EXPERTS)])
        if is_foreseen:
            slots.prefetch([key])
        compute(slots, key)
        slots.withdraw(1 - key.layer)
    slots.forget()
    slots.check_integrity()


def step(slots: SlotQueue, key: ExpertKey) -> None:
    """An expert is used batch by batch, up to the end of its step."""
    compute(slots, key, keep=True)
    slots.release(key.layer)
    slots.check_integrity()


def test_an_expert_that_makes_room_for_another_of_its_layer_is_given_up_once() -> None:
    slots = queue("lru", 1)
    step(slots, KEYS[0])
    slots.prefetch([KEYS[0]])
    step(slots, KEYS[1])
    slots.withdraw(0, keep=[0])
    slots.prefetch([KEYS[0]])
    step(slots, KEYS[0])
    assert [slots.holds(key) for key in KEYS[:2]] == [True, False]


def test_an_expert_that_is_likely_next_stays_when_it_makes_room_as_a_step_ends() -> None:
    slots = queue("lru", 1, num_slots=2)
    step(slots, KEYS[0])
    slots.prefetch([KEYS[0]])
    step(slots, KEYS[1])  # expert 0 has left the cache for expert 1
    slots.withdraw(0, keep=[0])
    slots.require(KEYS[0])
    slots.prefetch([KEYS[1]])
    step(slots, KEYS[0])
    assert [slots.is_ready(key) for key in KEYS[:2]] == [True, True]


def test_what_was_foreseen_of_layers_that_a_pass_leaves_out_is_forgotten() -> None:
    foresight, num_layers = Foresight(), 2
    for number in range(20):
        foresight.foresee(number * num_layers, 0, [1])  # left out: no gate chooses
        foresight.ask(number * num_layers + 1, 1, [1], lambda expert: "absent")
        foresight.end_pass()
    assert foresight.layers[1].num_asked == 20
    assert not foresight._steps


def test_foreseeing_is_counted_by_what_was_chosen_and_what_was_in_time() -> None:
    foresight = Foresight()
    states = {0: "resident", 1: "arrived", 2: "in flight", 3: "absent"}
    foresight.foresee(7, 1, [0, 1, 2])
    foresight.ask(7, 1, [1, 2], states.__getitem__)
    foresight.foresee(7, 1, [3])  # too late
    foresight.ask(7, 1, [3], states.__getitem__)
    foresight.end_pass()
    of_layer = foresight.layers[1]
    assert (of_layer.num_asked, of_layer.num_there, of_layer.num_arrived) == (3, 0, 1)
    assert of_layer.accuracy == pytest.approx(2 / 3)
    assert of_layer.fetch_rate == pytest.approx(2 / 3)
    assert of_layer.good_prediction == pytest.approx(1 / 3)
    assert of_layer.begun == pytest.approx(2 / 3)
