"""Shares of a policy in whole layers."""

from hypothesis import given
from hypothesis import strategies as st

from moebatch.spec.policy.policy import Placement, kv_levels


def test_half_of_eight_layers_is_four() -> None:
    assert kv_levels(Placement(vram=0.5, dram=0.5), 8) == ("vram",) * 4 + ("dram",) * 4


def test_main_memory_takes_the_broken_layer_where_nothing_is_on_disk() -> None:
    assert kv_levels(Placement(vram=0.4, dram=0.6), 4) == ("vram", "dram", "dram", "dram")


def test_the_disk_takes_the_broken_layers_where_it_has_a_share() -> None:
    levels = kv_levels(Placement(vram=0.3, dram=0.4, disk=0.3), 4)
    assert levels == ("vram", "dram", "disk", "disk")


def test_a_share_that_only_a_solver_sees_puts_nothing_on_disk() -> None:
    assert kv_levels(Placement(dram=1 - 1e-9, disk=1e-9), 3) == ("dram",) * 3


@given(weights=st.tuples(*[st.integers(0, 20)] * 3).filter(any), num_layers=st.integers(1, 100))
def test_each_layer_has_a_home_and_no_level_but_the_lowest_more_than_its_share(
    weights: tuple[int, int, int], num_layers: int
) -> None:
    vram, dram, disk = (weight / sum(weights) for weight in weights)
    levels = kv_levels(Placement(vram=vram, dram=dram, disk=disk), num_layers)
    assert len(levels) == num_layers
    assert sorted(levels, key=("vram", "dram", "disk").index) == list(levels)
    assert levels.count("vram") <= vram * num_layers + 1e-6
    if disk:
        assert levels.count("dram") <= dram * num_layers + 1e-6
    else:
        assert "disk" not in levels
