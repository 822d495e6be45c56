"""What holds for a run of a job, whatever becomes of it."""

from collections.abc import Callable
from dataclasses import dataclass

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation import Approximation
from moebatch.folder.row_key import RowKeys
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import Shard
from moebatch.job.options import RunOptions
from moebatch.job.stop import Stop
from moebatch.rows.prepare import Preparation
from moebatch.rows.raw import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What attempts stand on."""

    source: Source
    files: ModelFiles
    approximation: Approximation
    preparation: Preparation
    keys: RowKeys
    created: int
    """Unix time of all answers."""
    shard: Shard
    folder: RunFolder
    num_threads: int
    options: RunOptions
    stop: Stop
    tell: Callable[[str], None]
