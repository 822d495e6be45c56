"""Traces of routing: recording, keeping, playing back."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from moebatch.errors import CheckpointError
from moebatch.predict.trace import RoutingTrace
from tests.predict.test_path_table import random_pass


def some_trace(num_experts: int = 6) -> RoutingTrace:
    sizes = enumerate((5, 1, 9))
    passes = [random_pass(i, layers=2, tokens=n, experts=num_experts, k=2) for i, n in sizes]
    return RoutingTrace.of(passes, (1, 3), num_experts=num_experts)


@pytest.mark.parametrize(("num_experts", "dtype"), [(6, np.uint8), (300, np.uint16)])
def test_a_trace_comes_back_as_it_was(tmp_path: Path, num_experts: int, dtype: type) -> None:
    trace, path = some_trace(num_experts), tmp_path / "trace.safetensors"
    trace.save(path)
    again = RoutingTrace.load(path)
    assert (again.moe_layers, again.num_experts, again.experts_per_token) == (
        (1, 3),
        num_experts,
        2,
    )
    assert [one.shape for one in again.passes] == [(2, 5, 2), (2, 1, 2), (2, 9, 2)]
    for one, other in zip(trace.passes, again.passes, strict=True):
        assert other.dtype == dtype
        assert np.array_equal(one, other)


def test_the_order_of_many_passes_is_kept(tmp_path: Path) -> None:
    passes = [np.full((1, number + 1, 1), number % 3) for number in range(12)]
    path = tmp_path / "trace"
    RoutingTrace.of(passes, (0,), num_experts=3).save(path)
    assert [one.shape[1] for one in RoutingTrace.load(path).passes] == list(range(1, 13))


def test_other_files_are_refused_with_their_reason(tmp_path: Path) -> None:
    path = tmp_path / "trace"

    def write(arrays: dict[str, object], text: str) -> None:
        path.write_bytes(save(arrays, metadata={"moebatch": text}))

    def reason() -> str:
        with pytest.raises(CheckpointError) as caught:
            RoutingTrace.load(path)
        assert str(caught.value).endswith("; record one by `moebatch calibrate --trace`")
        return str(caught.value)

    good = (
        '{"kind": "routing trace", "version": 1, "moe_layers": [0], "num_experts": 4, '
        '"experts_per_token": 2}'
    )
    experts = np.ones((1, 3, 2), np.uint8)
    write({"pass.0": experts}, '{"kind": "correlation table"}')
    assert "is no routing trace" in reason()
    write({"pass.0": experts}, good.replace("1,", "7,", 1))
    assert "version 7" in reason()
    write({"pass.0": experts}, good.replace("[0]", "0"))
    assert "description is damaged" in reason()
    write({"pass.1": experts}, good)
    assert "array 'pass.0' is missing, must be uint8" in reason()
    write({"pass.0": experts[0]}, good)
    assert "array 'pass.0' is uint8 [3, 2], must be uint8 [1, 2, 2]" in reason()
    write({"pass.0": experts[:, :, :1].copy()}, good)
    assert "array 'pass.0' is uint8 [1, 3, 1], must be uint8 [1, 3, 2]" in reason()
    write({"pass.0": experts * 4}, good)
    assert "names an expert that is not there" in reason()
    write({"pass.0": experts}, good)
    assert RoutingTrace.load(path).passes[0].shape == (1, 3, 2)
