"""When weights outside experts come up, and what they wait for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.schedule.drivers.layer_weights import LayerWeights
from moebatch.schedule.request import CannotGoOn
from moebatch.schedule.setup import NUM_LAYER_PLACES, Setup
from moebatch.schedule.task import Kind, Task, attend, combine


def setup(num_layers: int, streamed: tuple[int, ...]) -> Setup:
    return Setup(
        num_layers=num_layers,
        num_experts=2,
        moe_layers=frozenset(range(num_layers)),
        num_hot=1,
        streamed=streamed,
    )


def up(step: int) -> Task:
    return Task(Kind.LAYER_UP, step)


def test_the_next_layer_is_on_its_way_while_one_is_computed() -> None:
    weights = LayerWeights(setup(6, (0, 1, 2, 3, 4, 5)))
    assert [*weights.before(attend(0, 0))] == [up(0), up(1), attend(0, 0)]
    assert [*weights.before(combine(0))] == [combine(0)]
    assert [*weights.before(attend(1, 0))] == [up(2), attend(1, 0)]
    assert [*weights.before(attend(2, 0))] == [up(3), attend(2, 0)]


def test_behind_the_last_one_comes_the_first_of_the_next_pass() -> None:
    weights = LayerWeights(setup(5, (1, 3)))
    launched = [[*weights.before(attend(step, 0))] for step in range(5)]
    assert launched[3:] == [[up(6), attend(3, 0)], [attend(4, 0)]]


def test_a_place_is_filled_again_when_all_that_read_it_has_ended() -> None:
    weights = LayerWeights(setup(6, (0, 1, 2, 3, 4, 5)))
    launched = [
        task
        for step in range(4)
        for given_task in (attend(step, 0), attend(step, 1), combine(step))
        for task in weights.before(given_task)
    ]
    again = next(task for task in launched if task == up(3))
    assert again.after == (combine(0),)


def test_layers_that_stay_wait_for_nothing() -> None:
    weights = LayerWeights(setup(4, (1, 3)))
    first, second = weights.before(attend(0, 0))
    assert (first, second.after) == (up(1), ())
    assert [*weights.before(attend(1, 0))][-1].after == (up(1),)


def test_a_task_that_comes_too_late_for_its_weights_is_refused() -> None:
    weights = LayerWeights(setup(6, (0, 1, 2, 3, 4, 5)))
    for step in range(4):
        assert [*weights.before(attend(step, 0))]
    with pytest.raises(CannotGoOn, match="have made room for later ones"):
        [*weights.before(attend(0, 1))]


@given(st.integers(1, 12), st.data())
def test_every_task_has_its_weights_and_no_place_is_overwritten(
    num_layers: int, data: st.DataObject
) -> None:
    """Also where a layer is begun while the one before, of the same pass, is in work."""
    streamed = tuple(sorted(data.draw(st.sets(st.integers(0, num_layers - 1)))))
    weights = LayerWeights(setup(num_layers, streamed))
    place = {layer: n % NUM_LAYER_PLACES for n, layer in enumerate(streamed)}
    there: dict[int, int] = {}
    last: dict[int, Task] = {}
    for step in range(3 * num_layers):
        runs_ahead = (step + 1) % num_layers and data.draw(st.booleans())
        ahead = [attend(step + 1, 0)] if runs_ahead else []
        for given_task in (attend(step, 0), *ahead, attend(step, 1), combine(step)):
            for task in weights.before(given_task):
                layer = task.step % num_layers
                if layer not in place:
                    continue
                if task.kind is Kind.LAYER_UP:
                    before = there.get(place[layer])
                    assert before is None or task.after == (last[before],)
                    there[place[layer]] = task.step
                else:
                    assert there[place[layer]] == task.step
                    last[task.step] = task
