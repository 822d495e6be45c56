"""The fixed set of jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.benchmarks.jobs.lengths import Lengths, even, ragged


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The same job with one thing switched off, for comparison."""

    name: str
    option: str
    """Of `moebatch run`."""


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """A job as it is benchmarked."""

    name: str
    lengths: Lengths
    variants: tuple[Variant, ...] = ()

    @property
    def in_words(self) -> str:
        """``16 x 64 in, 64 out``."""
        prompts, answers = self.lengths.prompts, self.lengths.answers
        header = self.lengths.num_header_tokens
        shared = f", {header} shared" if header else ""
        return f"{self.lengths.num_rows} x {_range(prompts)} in{shared}, {_range(answers)} out"


_STATIC = Variant(name="static batches", option="--static")
_NO_SHARE = Variant(name="nothing shared", option="--no-share")


def full_jobs() -> Mapping[str, BenchJob]:
    """About an hour, with peers."""
    return _named(
        BenchJob(name="ragged", lengths=ragged(1024), variants=(_STATIC,)),
        BenchJob(name="long-prompts", lengths=even(256, 1500, 32)),
        BenchJob(name="long-answers", lengths=even(256, 32, 256)),
        BenchJob(
            name="common-header",
            lengths=even(1024, 450, 32, header=400),
            variants=(_NO_SHARE,),
        ),
        BenchJob(name="few-rows", lengths=even(16, 64, 64)),
    )


def scale_jobs() -> Mapping[str, BenchJob]:
    """Ever more of the same short rows: what each of them costs, and what memory does."""
    counts = (256, 1024, 4096, 8192)
    return _named(*(BenchJob(name=f"rows-{n}", lengths=_short_rows(n)) for n in counts))


def small_jobs() -> Mapping[str, BenchJob]:
    """The same kinds of rows, but fewer of them and shorter answers: within five minutes."""
    return _named(
        BenchJob(
            name="ragged",
            lengths=ragged(256, answers=(1, 16), mean_answer=8),
            variants=(_STATIC,),
        ),
        BenchJob(name="long-prompts", lengths=even(16, 1500, 4)),
        BenchJob(name="long-answers", lengths=even(256, 32, 12)),
        BenchJob(name="common-header", lengths=even(64, 450, 4, header=400), variants=(_NO_SHARE,)),
        BenchJob(name="few-rows", lengths=even(16, 64, 8)),
    )


def _short_rows(count: int) -> Lengths:
    return ragged(count, mean_prompt=32, longest_prompt=128, answers=(4, 16), mean_answer=8)


def _named(*jobs: BenchJob) -> dict[str, BenchJob]:
    return {job.name: job for job in jobs}


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    if low == high:
        return str(low)
    return f"{low} to {high} (mean {sum(values) / len(values):.0f})"
