"""A recorded trace as routing for the simulator."""

from pathlib import Path

import numpy as np
import pytest

from moebatch.errors import ConfigError
from moebatch.predict.trace import RoutingTrace, TraceRouting, load_routing
from tests.plan.problems import SHAPE

LAYERS = (1, 3)


def routing() -> TraceRouting:
    """Two passes of five tokens: layer 1 likes 0 and 2, layer 3 likes 3 and now and then 1."""
    first = np.array([[[0, 2]] * 5, [[3, 1], *[[3, 2]] * 4]])
    second = np.array([[[0, 2]] * 5, [[3, 2]] * 5])
    return TraceRouting(RoutingTrace.of([first, second], LAYERS, num_experts=4))


def test_tokens_choose_what_those_of_the_trace_have_chosen() -> None:
    assert list(routing().rows(0, 1, 0, 3)) == [3, 0, 3, 0]
    assert routing().rows(4, 3, 7, 6).sum() == 12


def test_more_tokens_than_the_trace_has_repeat_it() -> None:
    assert list(routing().rows(0, 3, 0, 100)) == [0, 10, 90, 100]


def test_a_token_chooses_an_expert_as_often_as_the_trace_has_it() -> None:
    chances_E = routing().chances(3)
    assert list(np.argsort(-chances_E)) == [3, 2, 1, 0]
    assert chances_E.sum() == pytest.approx(2)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_same_micro_batch_draws_the_same(layer: int) -> None:
    assert list(routing().rows(2, layer, 1, 4)) == list(routing().rows(2, layer, 1, 4))


def test_a_trace_with_another_number_of_experts_per_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    k = SHAPE.experts_per_token
    passes = [np.zeros((len(SHAPE.moe_layers), 3, k + 1), int)]
    RoutingTrace.of(passes, SHAPE.moe_layers, num_experts=SHAPE.num_experts).save(path)
    with pytest.raises(ConfigError, match=f"{k + 1} per token; this one has .* {k} per token"):
        load_routing(path, SHAPE)
