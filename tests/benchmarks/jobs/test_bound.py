"""The least time of a job."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moebatch.spec.model.shape import ModelShape
from tests.benchmarks.jobs.bound import bound_of, job_flop
from tests.benchmarks.jobs.lengths import even
from tests.benchmarks.jobs.probe import Probe, between
from tests.shapes import load_shape

RATES = Probe(disk_rate=2e9, gemm_rate=1e12)


@pytest.fixture(scope="module")
def shape(tiny_checkpoint: Callable[..., Path]) -> ModelShape:
    return load_shape(tiny_checkpoint())


def test_the_slower_lane_binds() -> None:
    by_disk = bound_of(8e9, 1e12, RATES)
    assert (by_disk.seconds, by_disk.lane) == (4.0, "disk")
    by_compute = bound_of(8e9, 7e12, RATES)
    assert (by_compute.seconds, by_compute.lane) == (7.0, "compute")


def test_a_disk_that_is_slow_half_of_the_time_counts_by_its_time() -> None:
    fast, slow = RATES, Probe(disk_rate=1e9, gemm_rate=1e12)
    assert between(fast, slow).disk_rate == pytest.approx(4e9 / 3)


def test_operations_of_one_token(shape: ModelShape) -> None:
    chosen = shape.num_layers * shape.experts_per_token * shape.expert_params
    dense = shape.resident_params - shape.embedding_params
    head = shape.vocab_size * shape.hidden_size
    attention = shape.num_layers * shape.attention.flops_per_pair
    assert job_flop(even(1, 1, 1), shape) == 2 * (chosen + dense + head) + attention


def test_the_last_token_of_an_answer_is_not_computed_further(shape: ModelShape) -> None:
    head = 2 * shape.vocab_size * shape.hidden_size
    assert job_flop(even(1, 5, 2), shape) == job_flop(even(1, 6, 1), shape) + head


def test_a_shared_header_is_computed_once(shape: ModelShape) -> None:
    rows, header = 4, 10
    apart = job_flop(even(rows, 15, 1), shape)
    together = job_flop(even(rows, 15, 1, header=header), shape)
    head = 2 * shape.vocab_size * shape.hidden_size
    assert apart - together == (rows - 1) * (job_flop(even(1, header, 1), shape) - head)


def test_what_the_disk_has_given_meanwhile_counts_if_it_is_more() -> None:
    assert RATES.with_disk_of(3e9) == Probe(disk_rate=3e9, gemm_rate=1e12)
    assert RATES.with_disk_of(1e9) == RATES
