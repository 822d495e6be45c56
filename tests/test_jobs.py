"""Examples that people copy work as they stand."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_cli import LAMPS, LONG, PROMPTS, answers, write_job

JOBS = Path(__file__).parents[1] / "jobs"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The command, where neither an environment nor a path leads to it."""
    path = tmp_path / "moebatch"
    repository = JOBS.parent
    path.write_text(
        f"#!/bin/sh\nPYTHONPATH='{repository}' exec '{sys.executable}' -m moebatch \"$@\"\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def nightly(program: Path, tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """What cron runs: nearly no environment, no terminal, another folder. What has been compiled
    before need not be again."""

    def run(job: Path, runtime: str = "1h") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["/bin/sh", JOBS / "nightly.sh", job],
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={
                "HOME": str(tmp_path),
                "PATH": "/usr/bin:/bin",
                "MOEBATCH": str(program),
                "MOEBATCH_RUNTIME": runtime,
                "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", f"{Path.home()}/.cache"),
            },
        )

    return run


@pytest.mark.exhaustive
def test_cron_has_nothing_to_mail_when_all_is_well(
    nightly: Callable[..., "subprocess.CompletedProcess[str]"],
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
) -> None:
    job = write_job(tmp_path, tiny_checkpoint(), PROMPTS)
    for _ in range(2):
        done = nightly(job)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert len(answers(tmp_path)) == len(PROMPTS)


@pytest.mark.exhaustive
def test_the_end_of_a_night_is_nothing_to_mail(
    nightly: Callable[..., "subprocess.CompletedProcess[str]"],
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
) -> None:
    job = write_job(tmp_path, tiny_checkpoint(), LAMPS, sampling=LONG)
    done = nightly(job, "3s")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.exhaustive
def test_cron_mails_what_is_wrong(
    nightly: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    done = nightly(write_job(tmp_path, tmp_path / "no model", PROMPTS))
    assert done.returncode == 5
    assert "no such model folder" in done.stderr
