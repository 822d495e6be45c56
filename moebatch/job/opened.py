"""A job with what its paths hold."""

import datetime
from dataclasses import replace
from functools import cached_property

from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.engine.approximation import EXACT, Approximation
from moebatch.engine.approximation_files import GATING, PREGATES, load_gating, load_pregates
from moebatch.errors import ConfigError, Fault
from moebatch.folder.claim import Claim, Manifest, require_own, require_own_errors
from moebatch.folder.run_folder import RunFolder
from moebatch.job.hints import Hints
from moebatch.job.identity import manifest_of
from moebatch.rows.prompts import RowReader, open_reader
from moebatch.rows.row import Source
from moebatch.rows.source import first_rows, open_source
from moebatch.schedule.registry import PRE_GATED
from moebatch.spec.job import Job


class OpenedJob:
    """Each part is opened when it is first asked for, and once. What is missing, damaged or of
    another state of the model raises InputError or CheckpointError then."""

    def __init__(self, job: Job, *, limit: int | None = None) -> None:
        """Of the input only the first rows, if there is a limit."""
        self.job = job
        self._limit = limit

    @cached_property
    def source(self) -> Source:
        """The rows."""
        return first_rows(open_source(self.job.input.path), self._limit)

    @cached_property
    def files(self) -> ModelFiles:
        """The model, in a shape that sees and caches keys and values as the job says."""
        files = open_model(self.job.model.path, self.job.model.dtype)
        resources = self.job.resources
        shape = files.shape.cached_in(resources.kv_cache, resources.state_cache)
        return replace(files, shape=shape.seen_through(self.job.model.sink_window))

    @cached_property
    def approximation(self) -> Approximation:
        """What the job lets a run change about answers."""
        return load_approximation(self.job, self.files)

    def schedule(self, asked: str | None, *, has_policy: bool) -> str | None:
        """The schedule that is planned for: the one that was `asked` for, else, without a policy,
        that which pre-gates are made for. None leaves it to the planner or the policy."""
        pre_gated = PRE_GATED.name if self.approximation.activation_level else None
        return asked or (None if has_policy else pre_gated)

    @cached_property
    def manifest(self) -> Manifest:
        """What decides over the answers."""
        return manifest_of(self.job, self.files, self.approximation)

    @cached_property
    def hints(self) -> Hints:
        """What `moebatch calibrate` has left beside the model."""
        return Hints(self.job, self.files)

    @cached_property
    def reader(self) -> RowReader:
        """What rows need of the model, with today's date."""
        return self.reader_of(None)

    def reader_of(self, date: datetime.date | None) -> RowReader:
        """The same with a date for the chat templates that ask for it."""
        shape = self.files.shape
        return open_reader(
            self.job,
            vocab_size=shape.vocab_size,
            max_positions=shape.max_positions,
            gguf=self.files.checkpoint.gguf_file,
            start_token=shape.encoder.start_token if shape.encoder else None,
            today=date,
        )

    def require_own_output(self) -> Claim | None:
        """What earlier runs of the job have left; raises ConfigError if others have."""
        folder = RunFolder(self.job.output.path)
        before = require_own(self.manifest, folder, self.source)
        require_own_errors(before, folder, self.job.output.errors)
        return before


def load_approximation(job: Job, files: ModelFiles) -> Approximation:
    """What the job asks for, with what `moebatch calibrate` has left beside the model.

    Raises CheckpointError if that is missing, damaged or of another state of the model.
    """
    attention, recurrence = files.shape.attention, files.shape.recurrence
    return replace(
        _load_gating(job, files),
        cache_dtype=attention.cache_dtype,
        has_half_states=recurrence is not None and recurrence.state_dtype == "float16",
        sink_window=attention.sink_window,
    )


def _load_gating(job: Job, files: ModelFiles) -> Approximation:
    folder, owner, asked = job.model.folder, files.owner, job.experts
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
    faults = [
        Fault(
            file="--exact",
            message=f"forbids {key}: {value}, with which answers are not exactly the model's own; "
            f"{remedy}, or leave --exact out",
        )
        for key, value, exact, remedy in (
            ("experts.gating", job.experts.gating, "exact", "set it to exact"),
            ("resources.kv_cache", job.resources.kv_cache, "full", "set it to full"),
            ("resources.state_cache", job.resources.state_cache, "full", "set it to full"),
            ("model.attention", job.model.sink_window, None, "leave it out"),
        )
        if value != exact
    ]
    if faults:
        raise ConfigError(faults)
