"""What a job lets a run change about answers."""

from dataclasses import replace

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation import EXACT, Approximation
from moebatch.engine.approximation_files import GATING, PREGATES, load_gating, load_pregates
from moebatch.errors import ConfigError, Fault
from moebatch.spec.job import Job


def load_approximation(job: Job, files: ModelFiles) -> Approximation:
    """What the job asks for, with what `moebatch calibrate` has left beside the model.

    Raises CheckpointError if that is missing, damaged or of another state of the model.
    """
    folder, owner, asked = job.model.path, files.owner, job.experts
    if asked.gating == "exact":
        return EXACT
    if asked.gating == "pre-gated":
        path, hidden_size = PREGATES.path(folder), files.shape.hidden_size
        return Approximation(pregates=load_pregates(path, owner, hidden_size=hidden_size))
    gating = load_gating(GATING.path(folder), owner).gating
    if asked.threshold is not None:
        gating = replace(gating, threshold=asked.threshold)
    return Approximation(gating=gating)


def require_exact(job: Job) -> None:
    """Raises ConfigError unless answers are exactly the model's own."""
    gating = job.experts.gating
    if gating != "exact":
        message = (
            f"forbids experts.gating: {gating}, with which answers are not exactly the model's "
            "own; set it to exact, or leave --exact out"
        )
        raise ConfigError([Fault(file="--exact", message=message)])
