"""Times as Slurm writes them, what a run makes of them, and the script for a cluster."""

import subprocess
import time
from pathlib import Path

import pytest

from moebatch.errors import ConfigError
from moebatch.folder.claim import FirstRun, Manifest, claim
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import Shard
from moebatch.job.sbatch import Submission, submission_script
from moebatch.job.slurm import (
    array_task,
    parse_runtime,
    parse_time_limit,
    reserve_s,
    seconds_left,
    slurm_job_id,
)
from moebatch.rows.source import open_source
from moebatch.spec.job import load_job


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("4:00:00", 14_400),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("0-0:0:5", 5),
    ],
)
def test_limits_are_read_as_slurm_reads_them(text: str, seconds: float) -> None:
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "1:2:3:4", "4h", "-5", "0", "1-"])
def test_what_slurm_would_not_understand(text: str) -> None:
    assert parse_time_limit(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h30m", 12_600), ("45s", 45), ("1d", 86_400), ("2:00", 120), ("1-00:00", 86_400)],
)
def test_how_long_a_run_may_take(text: str, seconds: float) -> None:
    assert parse_runtime(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "soon", "3x", "-1h", "1h 30m"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 3h30m"):
        parse_runtime(text)


def test_short_jobs_keep_most_of_their_time() -> None:
    assert reserve_s(60.0) == 15.0
    assert reserve_s(86_400.0) == 90.0


def test_the_task_of_an_array_has_a_name_of_its_own() -> None:
    array = {"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "68", "SLURM_ARRAY_TASK_ID": "2"}
    assert (slurm_job_id(array), array_task(array)) == ("68_2", 2)
    assert (slurm_job_id({"SLURM_JOB_ID": "70"}), array_task({})) == ("70", None)


def test_time_that_is_left() -> None:
    end_s = int(time.time()) + 100_000
    known = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(end_s)}
    most_s = end_s - time.time()
    left_s = seconds_left(known)
    assert left_s is not None
    assert end_s - time.time() <= left_s <= most_s
    assert seconds_left({}) is None


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "my job.yaml"
    path.write_text(
        "model: {path: m}\ninput: {path: in.jsonl}\noutput: {path: out.jsonl}\n"
        "resources: {dram: 10GiB, threads: 3}"
    )
    return path


def test_the_script_asks_for_what_the_job_needs(job_file: Path) -> None:
    script = submission_script(
        job_file,
        load_job(job_file),
        Submission(num_shards=8, time_limit="4:00:00", options=("--partition=gpu",)),
    )
    for line in (
        "#SBATCH --array=1-8",
        "#SBATCH --signal=B:USR1@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --time=4:00:00",
        "#SBATCH --cpus-per-task=3",
        "#SBATCH --mem=11264M",
    ):
        assert script.count(f"{line}\n") == 1
    assert script.count("#SBATCH --partition=gpu\n") == 2, "the merge needs it, too"
    assert script.index("trap '' USR1") < script.index("exec "), "early signals are let pass"
    assert "exec" in script and f"'{job_file}' --shard \"$SLURM_ARRAY_TASK_ID/8\"" in script
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize(("num_shards", "shards"), [(1, "1 shard"), (3, "3 shards")])
def test_the_script_names_shards_that_there_are(
    job_file: Path, num_shards: int, shards: str
) -> None:
    script = submission_script(job_file, load_job(job_file), Submission(num_shards=num_shards))
    assert f" in {shards}, then the merge." in script
    assert f"# Shard {num_shards} again" in script and f"--array={num_shards}\n" in script


def in_folder(folder: Path, job_file: Path) -> str:
    folder.mkdir()
    moved = job_file.rename(folder / 'my "own" job.yaml')
    return submission_script(moved, load_job(moved), Submission(num_shards=2))


def test_what_slurm_reads_in_paths_stands_for_itself(tmp_path: Path, job_file: Path) -> None:
    script = in_folder(tmp_path / '100%jobs "x"', job_file)
    folder = str(tmp_path / '100%%jobs \\"x\\"/out.jsonl.moebatch')
    for line in (
        f'--output="{folder}/slurm-%A_%a.log"',
        f'--output="{folder}/slurm-%A-merge.log"',
        '--job-name="my \\"own\\" job"',
        '--job-name="my \\"own\\" job-merge"',
    ):
        assert script.count(f"#SBATCH {line}\n") == 1


@pytest.mark.parametrize("name", ["back\\slash", "two\nlines"])
def test_a_folder_that_slurm_cannot_name_is_refused(
    tmp_path: Path, job_file: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match=r"no backslash may be in it|cannot name"):
        in_folder(tmp_path / name, job_file)


def test_a_job_that_is_a_link_keeps_its_paths_beside_the_link(
    tmp_path: Path, job_file: Path
) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "there/linked.yaml"
    link.symlink_to(job_file)
    script = submission_script(link, load_job(link), Submission(num_shards=2))
    assert script.count(f" {link} --shard") == script.count(f" merge {link} ") == 1
    assert f"mkdir -p {tmp_path}/there/out.jsonl.moebatch\n" in script


@pytest.mark.parametrize("option", ["partition=gpu", "--partition=gpu", " --partition=gpu "])
def test_options_need_no_dashes(job_file: Path, option: str) -> None:
    asked = Submission(num_shards=1, options=(option, "-A mine"))
    script = submission_script(job_file, load_job(job_file), asked)
    assert script.count("#SBATCH --partition=gpu\n#SBATCH -A mine\n") == 2


@pytest.mark.parametrize("option", ["", "--", "partition=gpu\nrm -r /"])
def test_what_is_no_option_is_refused(job_file: Path, option: str) -> None:
    with pytest.raises(ConfigError, match="must be one option of sbatch"):
        submission_script(job_file, load_job(job_file), Submission(num_shards=1, options=(option,)))


def test_another_number_of_shards_than_the_job_has_is_refused_at_once(job_file: Path) -> None:
    job = load_job(job_file)
    job.input.path.touch()
    source = open_source(job.input.path)
    claim(Manifest(fields={}), RunFolder(job.output.path), source, FirstRun.today(Shard(1, 3)))
    with pytest.raises(ConfigError, match="divided into 3 shards"):
        submission_script(job_file, job, Submission(num_shards=2))
    assert "--array=1-3" in submission_script(job_file, job, Submission(num_shards=3))


def test_short_tasks_are_told_in_time(job_file: Path) -> None:
    script = submission_script(
        job_file, load_job(job_file), Submission(num_shards=1, time_limit="1")
    )
    assert "--signal=B:USR1@15\n" in script


def test_a_limit_that_slurm_would_not_understand_is_refused(job_file: Path) -> None:
    with pytest.raises(ConfigError, match="4:00:00"):
        submission_script(job_file, load_job(job_file), Submission(num_shards=1, time_limit="4h"))
