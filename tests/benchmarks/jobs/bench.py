"""One job with everything beside it: probes, variants, peers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from moebatch.units import format_duration
from tests.benchmarks.jobs.bound import bound_of, job_flop
from tests.benchmarks.jobs.catalogue import BenchJob, Variant
from tests.benchmarks.jobs.checkpoint import STORED, packed, weight_files
from tests.benchmarks.jobs.peer import Peer
from tests.benchmarks.jobs.probe import Probe, between, probe
from tests.benchmarks.jobs.result import JobResult, VariantResult
from tests.benchmarks.jobs.rows import write_rows
from tests.benchmarks.jobs.run import Run, RunFailed, run_job, run_options
from tests.benchmarks.jobs.setting import Setting

Say = Callable[[str], None]


class Bench:
    """Takes jobs one at a time."""

    def __init__(
        self, setting: Setting, peers: Sequence[Peer], probe_s: float, with_variants: bool
    ) -> None:
        self._setting = setting
        self._peers = peers
        self._probe_s = probe_s
        self._with_variants = with_variants

    def results(self, job: BenchJob, weights: Sequence[str], say: Say) -> Iterator[JobResult]:
        """Runs the job with weights in each of these formats; with the weights as they were made,
        also what it is compared with. Raises RunFailed."""
        stored_s = None
        for stored in weights:
            result = replace(self._result(job, stored, say), stored_s=stored_s)
            if stored == STORED:
                stored_s = result.run.passes_s
                self._compare(result, say)
            yield result

    def _result(self, job: BenchJob, weights: str, say: Say) -> JobResult:
        setting = replace(self._setting, checkpoint=packed(self._setting.checkpoint, weights))
        rows = self._rows(job)
        say(f"{job.name}: {job.in_words}, {weights}")
        run, rates = self._measured(setting, rows)
        flop = job_flop(job.lengths, setting.shape)
        bound = bound_of(run.planned_bytes, flop, rates.with_disk_of(run.disk_rate))
        result = JobResult(job=job, run=run, rates=rates, bound=bound, weights=weights)
        say(f"    {format_duration(run.passes_s)}, {result.of_bound:.0%} of the bound")
        return result

    def _compare(self, result: JobResult, say: Say) -> None:
        job = result.job
        rows = self._rows(job)
        if self._with_variants:
            result.variants += [self._variant(variant, rows, say) for variant in job.variants]
        for peer in self._peers:
            found = peer.run(self._setting, rows, job.lengths.num_rows)
            result.peers.append(found)
            time = format_duration(found.best.job_s) if found.best else found.ended
            say(f"    {peer.name}: {time}")

    def _rows(self, job: BenchJob) -> Path:
        folder = self._setting.folder / job.name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "rows.jsonl"
        write_rows(path, job.lengths, self._setting.shape.vocab_size)
        return path

    def _measured(self, setting: Setting, rows: Path) -> tuple[Run, Probe]:
        before = self._probe()
        run = run_job(setting, rows)
        return run, between(before, self._probe())

    def _probe(self) -> Probe:
        return probe(weight_files(self._setting.checkpoint), read_s=self._probe_s)

    def _variant(self, variant: Variant, rows: Path, say: Say) -> VariantResult:
        result = VariantResult(name=variant.name, option=variant.option)
        if variant.option not in self._run_options:
            result.why_not = "`moebatch run` has no such option"
        else:
            try:
                result.passes_s = run_job(self._setting, rows, [variant.option]).passes_s
            except RunFailed as error:
                result.why_not = str(error)
        time = format_duration(result.passes_s) if result.passes_s else result.why_not
        say(f"    {variant.name}: {time}")
        return result

    @cached_property
    def _run_options(self) -> str:
        return run_options()
