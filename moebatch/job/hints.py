"""What earlier runs have learnt of a model's routing, if anything lies beside it."""

from moebatch.engine.model_files import ModelFiles
from moebatch.errors import CheckpointError
from moebatch.predict.correlation import CorrelationPredictor
from moebatch.predict.owner import ModelOwner
from moebatch.predict.predictor import Predictor
from moebatch.predict.table_file import TABLE, load_table
from moebatch.spec.job import Job
from moebatch.store.fingerprint import checkpoint_fingerprint


def load_predictor(job: Job, files: ModelFiles) -> tuple[Predictor | None, tuple[str, ...]]:
    """A predictor with the table that `moebatch calibrate` has left beside the model, and warnings.

    None without a table, or with one that is of no use: it only says what to load early, so a
    job must not die of it.
    """
    folder = job.model.path
    path = TABLE.path(folder)
    if not path.is_file():
        return None, ()
    fingerprint = checkpoint_fingerprint(files.config, files.checkpoint)
    try:
        table = load_table(path, ModelOwner.of(folder, fingerprint, files.shape))
    except CheckpointError as error:
        return None, (f"going on without the correlation table: {error}",)
    return CorrelationPredictor(table), ()
