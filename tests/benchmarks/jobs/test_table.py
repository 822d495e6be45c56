"""Tables for docs/performance.md."""

from dataclasses import replace
from typing import Any

from tests.benchmarks.jobs.bound import Bound
from tests.benchmarks.jobs.catalogue import BenchJob
from tests.benchmarks.jobs.estimate import PeerResult, Trial
from tests.benchmarks.jobs.lengths import even
from tests.benchmarks.jobs.probe import Probe
from tests.benchmarks.jobs.result import JobResult, VariantResult
from tests.benchmarks.jobs.run import Run
from tests.benchmarks.jobs.table import comparisons_table, jobs_table

SUMMARY: dict[str, Any] = {
    "elapsed_s": 50.0,
    "peak_bytes": 2**31,
    "lanes": [{"name": "disk->dram", "busy_s": 48.0}],
    "prediction": {"job_time_s": 45.0},
    "hindsight": None,
}


def result() -> JobResult:
    run = Run(summary=SUMMARY, wall_s=60.0, cgroup_peak_bytes=None, planned_bytes=90e9)
    peer = PeerResult(
        name="slow one",
        trials=[
            Trial(batch=8, job_s=1000.0, measured_share=0.1, detail="9 s a step"),
            Trial(batch=16, job_s=600.0, measured_share=0.2, detail="10 s a step"),
        ],
        ended="killed at batch 32: out of memory",
    )
    return JobResult(
        job=BenchJob(name="few", lengths=even(10, 5, 20)),
        run=run,
        rates=Probe(disk_rate=2e9, gemm_rate=1e12),
        bound=Bound(disk_s=45.0, compute_s=3.0),
        variants=[VariantResult(name="static batches", option="--static", passes_s=90.0)],
        peers=[peer],
    )


def cells(table: str, row: int) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[2 + row].strip("|").split("|")]


def test_a_job_has_a_line_with_its_ratio_to_the_bound() -> None:
    found = cells(jobs_table([result()]), 0)
    assert found[0] == "few: 10 x 5 in, 20 out"
    assert found[1] == "stored"
    assert found[3:6] == ["5.0s", "4.0", "1.0"]
    assert found[6].endswith("(?)")
    assert found[8:10] == ["90%", "96%"]


def test_a_line_says_how_much_faster_other_weights_are() -> None:
    packed = replace(result(), weights="int4", stored_s=150.0)
    assert cells(jobs_table([packed]), 0)[1] == "int4, 3.0 x"


def test_variants_and_best_trials_of_peers_are_compared() -> None:
    table = comparisons_table([result()])
    assert cells(table, 0)[5] == "1.8 x"
    peer = cells(table, 1)
    assert peer[1:3] == ["slow one", "16"]
    assert peer[5] == "12.0 x"
    assert "20.0% of it run" in peer[6]
    assert peer[6].endswith("killed at batch 32: out of memory")


def test_every_line_has_as_many_cells_as_the_heading() -> None:
    for table in (jobs_table([result()]), comparisons_table([result()])):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_what_could_not_be_compared_says_why() -> None:
    found = result()
    found.variants = [VariantResult(name="s", option="--static", why_not="no such option")]
    found.peers = [PeerResult(name="p", trials=[], ended="killed while loading: out of memory")]
    table = comparisons_table([found])
    assert cells(table, 0)[6] == "no such option"
    assert cells(table, 1)[6] == "killed while loading: out of memory"
