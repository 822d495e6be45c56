"""The model of a job, with the gates that the job wants it to have."""

from dataclasses import replace

from moebatch.engine.model_files import ModelFiles, open_model
from moebatch.engine.pregate_file import PREGATES, load_pregates
from moebatch.predict.owner import ModelOwner
from moebatch.spec.job import Job
from moebatch.store.fingerprint import checkpoint_fingerprint


def job_model(job: Job) -> ModelFiles:
    """The model folder of a job, checked, and the pre-gates beside it if the job asks for them.

    Raises CheckpointError when anything is missing, damaged, hostile or not supported, pre-gates
    that were made for another state of the model among it.
    """
    folder = job.model.path
    files = open_model(folder, job.model.dtype)
    if job.experts.gating == "exact":
        return files
    fingerprint = checkpoint_fingerprint(files.config, files.checkpoint)
    owner = ModelOwner.of(folder, fingerprint, files.shape)
    pregates = load_pregates(PREGATES.path(folder), owner, hidden_size=files.shape.hidden_size)
    return replace(files, pregates=pregates)
