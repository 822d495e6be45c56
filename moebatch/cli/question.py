"""What a command asks the planner."""

from pathlib import Path
from typing import TYPE_CHECKING

from moebatch.cli.threads import let_threads_sleep

if TYPE_CHECKING:
    from moebatch.plan.options import PlanOptions
    from moebatch.plan.question import Question


def asked_question(job: Path | None, options: "PlanOptions") -> "Question":
    """Of a job file, or of a model by name or shape, of which nothing has to be here."""
    return _stated(options) if job is None else _of_job(job, options)


def _stated(options: "PlanOptions") -> "Question":
    """Without torch, so that the answer is there at once."""
    from moebatch.measure.saved import named_profile
    from moebatch.plan.question import stated_question

    profile, notes = named_profile(options.hw)
    return stated_question(profile, options).noted(notes)


def _of_job(job: Path, options: "PlanOptions") -> "Question":
    """Its model, a sample of its rows, this machine."""
    let_threads_sleep()
    from moebatch.job.question import job_question
    from moebatch.spec.job import load_job

    return job_question(load_job(job), options)
