"""Where rows broke: the same whether it is looked at once or in the end."""

import pytest
import torch

from moebatch.engine.passes.broken import BrokenRows
from moebatch.model.routing.router import Routing
from moebatch.model.routing.tokens import group_by_expert

NUM_ROWS, NUM_EXPERTS = 6, 4


def routing(x_TD: torch.Tensor) -> Routing:
    """Row r chooses experts r and r + 1."""
    experts_TK = torch.stack([torch.arange(NUM_ROWS), torch.arange(1, NUM_ROWS + 1)], -1)
    experts_TK %= NUM_EXPERTS
    return Routing(
        rows=(slice(0, NUM_ROWS),),
        normed_TD=torch.zeros_like(x_TD),
        weights_TK=torch.ones(NUM_ROWS, 2),
        experts_TK=experts_TK,
        num_experts=NUM_EXPERTS,
        tokens=group_by_expert(experts_TK, slice(0, NUM_ROWS), NUM_EXPERTS),
        outputs_TKD=torch.zeros(NUM_ROWS, 2, x_TD.shape[1]),
    )


@pytest.mark.parametrize("is_lazy", [False, True])
def test_the_first_place_of_each_row_is_told(is_lazy: bool) -> None:
    broken, x_TD = BrokenRows(is_lazy=is_lazy), torch.zeros(NUM_ROWS, 8)
    broken.look(x_TD, 0, None)
    route = routing(x_TD)
    x_TD[2, 3] = torch.nan
    route.outputs_TKD[2, 1, 3] = torch.nan
    broken.look(x_TD, 1, route)
    x_TD[4] = torch.inf
    route.normed_TD[4] = torch.nan
    route.outputs_TKD[2] = torch.nan
    broken.look(x_TD, 2, route, slice(2, NUM_ROWS))
    x_TD[0] = -torch.inf
    broken.look(x_TD, 3, None)
    x_TD.zero_()
    route.outputs_TKD.zero_()
    assert [broken.place_of(row) for row in range(NUM_ROWS)] == [
        "layer 3",
        "the head",
        "layer 1, expert 3",
        "the head",
        "layer 2, attention",
        "the head",
    ]


def test_sound_numbers_whose_sum_is_beyond_float16_cost_no_second_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def note(self: BrokenRows, look: object) -> None:
        raise AssertionError("all rows are sound")

    monkeypatch.setattr(BrokenRows, "_note", note)
    broken = BrokenRows()
    broken.look(torch.full((NUM_ROWS, 500), 300.0, dtype=torch.float16), 0, None)
    assert broken.place_of(0) == "the head"
