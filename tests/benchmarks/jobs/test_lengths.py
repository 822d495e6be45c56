"""Lengths of rows: those that the issue of throughput fixes."""

import pytest

from tests.benchmarks.jobs.catalogue import full_jobs, small_jobs
from tests.benchmarks.jobs.lengths import even, ragged


def test_ragged_rows_have_the_stated_means_and_bounds() -> None:
    lengths = ragged(1024)
    assert lengths.num_rows == 1024
    assert lengths.prompt_tokens / 1024 == pytest.approx(77, abs=0.1)
    assert max(lengths.prompts) == 418
    assert lengths.answer_tokens / 1024 == pytest.approx(64, abs=0.1)
    assert (min(lengths.answers), max(lengths.answers)) == (8, 128)


def test_ragged_prompts_are_skewed_to_the_short_side() -> None:
    prompts = sorted(ragged(1024).prompts)
    assert prompts[512] < 65 < 77


def test_fewer_ragged_rows_keep_the_means() -> None:
    lengths = ragged(100, answers=(1, 16), mean_answer=8)
    assert lengths.prompt_tokens / 100 == pytest.approx(77, abs=0.2)
    assert lengths.answer_tokens / 100 == pytest.approx(8, abs=0.2)


def test_lengths_are_the_same_every_time() -> None:
    assert ragged(64) == ragged(64)


def test_full_jobs_are_those_of_the_issue() -> None:
    jobs = full_jobs()
    assert list(jobs) == ["ragged", "long-prompts", "long-answers", "common-header", "few-rows"]
    assert jobs["long-prompts"].lengths == even(256, 1500, 32)
    assert jobs["long-answers"].lengths == even(256, 32, 256)
    assert jobs["common-header"].lengths == even(1024, 450, 32, header=400)
    assert jobs["few-rows"].lengths == even(16, 64, 64)


def test_small_jobs_have_the_same_names() -> None:
    assert list(small_jobs()) == list(full_jobs())


def test_jobs_are_described_by_their_lengths() -> None:
    jobs = full_jobs()
    assert jobs["few-rows"].in_words == "16 x 64 in, 64 out"
    assert jobs["common-header"].in_words == "1024 x 450 in, 400 shared, 32 out"
    assert jobs["ragged"].in_words.endswith("8 to 128 (mean 64) out")
