"""Whose a run folder is: a job claims its output before it touches anything."""

import datetime
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Strict, ValidationError

from moebatch.errors import ConfigError, StorageError
from moebatch.folder.results import Answered
from moebatch.folder.row_key import RowKeys
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.shard import Shard
from moebatch.journal.files import Files, NewFile, storage_errors
from moebatch.journal.finished import Finished
from moebatch.journal.lock import RunLock
from moebatch.quoting import reason, shown
from moebatch.rows.row import Source
from moebatch.spec.files.json_file import read_json
from moebatch.spec.files.text_file import draft_of
from moebatch.spec.machine.hardware import Dtype

INPUT_PATH = "input.path"
"""The one field that decides nothing: folders and files may be moved, linked and compressed."""
GENERATION = "generation_config.json"
"""A field that folders of earlier versions lack."""


def input_path_text(path: Path) -> str:
    """A path as a manifest has it: JSON holds no bytes that are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Identity of a job: two jobs without differences give the same answers to the same rows."""

    fields: Mapping[str, str]
    """By the names under which a user knows them; among them where rows were first read."""

    @cached_property
    def row_keys(self) -> RowKeys:
        """What the rows of this job are known by, as long as this stays the manifest of its run
        folder."""
        text = json.dumps(dict(self.fields), sort_keys=True)
        return RowKeys(hashlib.blake2b(text.encode(), digest_size=32).digest())

    def differences(self, other: "Manifest") -> list[str]:
        """What makes it another job than `other`, with both values."""
        unknown = {GENERATION} - other.fields.keys()
        names = sorted((self.fields.keys() | other.fields.keys()) - {INPUT_PATH} - unknown)
        return [
            f"{name} was {shown(other.fields.get(name))}, is {shown(self.fields.get(name))}"
            for name in names
            if self.fields.get(name) != other.fields.get(name)
        ]


class FirstRun(BaseModel):
    """What the first run of a job decides for all later ones, since it would otherwise depend on
    the day or the command of each."""

    model_config = ConfigDict(frozen=True)

    date: datetime.date
    """The date that chat templates get: prompts of a run that is gone on with
    after midnight stay the same."""
    created: Annotated[int, Strict()] = 0
    """Unix time of the first run, which stands in all answers: what is gone on with ends with the
    bytes of what was not stopped. 0 in folders of versions that did not keep it."""
    num_shards: Annotated[int, Strict()] | None = None
    """Into how many shards the rows are divided; None if no run has asked for it."""
    errors: str | None = None
    """Where failed rows were last written to, from the folder of the output; None if among the
    answers, or nowhere yet."""
    earlier_errors: tuple[str, ...] = ()
    """Where they were written before."""
    is_written: Annotated[bool, Strict()] | None = None
    """Whether the output has been written; None in folders of versions that did not keep it."""
    journal_bytes: Annotated[int, Strict()] | None = None
    """Of the journals whose rows the output has; None before it has been written, and in folders of
    versions that did not keep it."""
    dtype: Dtype | None = None
    """What ``model.dtype: auto`` has come to mean; None before a run has found it, and in folders
    of versions that found it anew in each."""

    @classmethod
    def today(cls, shard: Shard) -> "FirstRun":
        """What a run of a shard would decide by itself."""
        num_shards = None if shard.is_all else shard.count
        return cls(
            date=datetime.date.today(),
            created=int(time.time()),
            num_shards=num_shards,
            is_written=False,
        )

    def written(self, errors: str | None) -> "FirstRun":
        """The same when the output is written, and failed rows to a path from its folder."""
        earlier = tuple(sorted(self._all_errors))
        update = {"is_written": True, "errors": errors, "earlier_errors": earlier}
        return self.model_copy(update=update)

    def has_written(self, errors: str) -> bool:
        """Whether failed rows were written to a path from the folder of the output."""
        return errors in self._all_errors

    @property
    def _all_errors(self) -> set[str]:
        return {*self.earlier_errors, *([self.errors] if self.errors else [])}

    def joined(self, later: "FirstRun") -> "FirstRun":
        """The same when a `later` run comes, whose number of shards has been agreed upon."""
        return self.model_copy(update={"num_shards": later.num_shards or self.num_shards})


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What the manifest of a run folder says."""

    manifest: Manifest
    first: FirstRun


class _Content(BaseModel):
    """A manifest as it is written."""

    job: dict[str, str]
    settled: FirstRun


def claim(manifest: Manifest, folder: RunFolder, source: Source, ours: FirstRun) -> Claim:
    """Makes a run folder that of a job, and returns what holds for all of its runs:
    its own manifest and `ours`, or what an earlier one has left there.

    Raises ConfigError, before anything is touched, if the output is of another job or not known to
    be of this one, and StorageError if the folder cannot be written.
    """
    for _ in range(2):
        there = read_claim(folder)  # first: what comes meanwhile is not ours to replace
        before = require_own(manifest, folder, source)
        first = before.first.joined(ours) if before else ours
        wanted = Claim(manifest=before.manifest if before else manifest, first=first)
        if there == wanted or _write(wanted, folder, only_new=there is None):
            return wanted
    raise StorageError(f"{folder.manifest}: other runs keep writing it")


def with_dtype(ours: Claim, folder: RunFolder, found: Dtype) -> Claim:
    """What holds for all runs of a job, in which ``model.dtype: auto`` means what its first run has
    `found`: another machine, or another measurement of the same, would say otherwise.

    Raises ConfigError if the run folder has become another job's, and StorageError.
    """
    there = require_still_own(ours, folder) or ours
    if there.first.dtype is not None:
        return there
    claimed = replace(there, first=there.first.model_copy(update={"dtype": found}))
    _write(claimed, folder, only_new=False)
    return require_still_own(ours, folder) or claimed  # what shards that begin at once agree upon


def require_still_own(ours: Claim, folder: RunFolder) -> Claim | None:
    """What the run folder says by now, None if it is gone. Raises ConfigError if it has become
    another job's: it was free for all as long as no row had ended, and what is answered for a job
    that it is not of is never looked up."""
    there = read_claim(folder)
    differences = there.manifest.differences(ours.manifest) if there else []
    if differences:
        message = (
            f"has become another job's while this one ran: {'; '.join(differences)}. Was the job "
            "file edited? Run it again, or choose another output.path"
        )
        raise _refusal(folder.output, message)
    return there


def require_own_errors(before: Claim | None, folder: RunFolder, errors: Path | None) -> None:
    """Raises ConfigError if there is something where failed rows are to go that no run of this job
    has written, or where a job has its answers."""
    if errors is None:
        return
    if (other := RunFolder(errors).path).is_dir():
        message = f"is the output of a job, which has {other}; choose another"
        raise _refusal(errors, message, where="output.errors")
    if not errors.exists():
        return
    if before is None or not before.first.has_written(_beside(folder, errors)):
        message = "exists, and this job has not written it; choose another, or move it away"
        raise _refusal(errors, message, where="output.errors")


@contextmanager
def written_claimed(ours: Claim, folder: RunFolder, errors: Path | None) -> Iterator[None]:
    """The files that the block writes are a job's from then on, and have what its journals say. No
    other job writes that of failed rows meanwhile: of two that end at once each would take the
    other's draft for its own.

    Raises ConfigError if one of them has become another's meanwhile, LockHeld, and StorageError.
    """
    with _held(errors):
        _require_not_anothers(ours, folder)
        require_own_errors(ours, folder, errors)
        claimed = ours.first.written(_beside(folder, errors) if errors else None)
        _write(replace(ours, first=claimed), folder, only_new=False)
        yield
        with suppress(StorageError):  # the output is there, and `moebatch merge` writes this again
            written = claimed.model_copy(update={"journal_bytes": folder.journal_bytes})
            _write(replace(ours, first=written), folder, only_new=False)


@contextmanager
def _held(errors: Path | None) -> Iterator[None]:
    """No other job writes its failed rows there, if anywhere, while the block runs."""
    if errors is None:
        yield
        return
    target = errors.resolve()
    lock = target.with_name(f".{target.name}.moebatch-lock")
    with RunLock(lock, subject=str(errors), elsewhere="another output.errors"):
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()


def _require_not_anothers(ours: Claim, folder: RunFolder) -> None:
    """Raises ConfigError if there is something where answers are to go that no run of this job has
    written."""
    if folder.output.exists() and ours.first.is_written is False:
        raise _refusal(
            folder.output,
            "exists, and this job has not written it; move it away and run the job again. Rows "
            f"that have ended are kept in {folder.path}",
        )


def _beside(folder: RunFolder, path: Path) -> str:
    """So that a folder may be moved as a whole."""
    return os.path.relpath(os.path.realpath(path), folder.path.parent)


def require_own(manifest: Manifest, folder: RunFolder, source: Source) -> Claim | None:
    """What earlier runs of a job have left, None if there were none.

    Raises ConfigError unless the output is free or an earlier answer to this job, and what reading
    the input raises. A run that ended before its first row binds no later one: its job may be
    changed and run again.
    """
    output, before = folder.output, read_claim(folder)
    if before is None:
        if output.exists():
            message = "exists, and no job has written it; choose another, or move it away"
            raise _refusal(output, message)
        return None
    _require_not_anothers(before, folder)
    differences = manifest.differences(before.manifest)
    if not output.exists() and not folder.has_records:
        return None if differences else before
    if not differences and _has_other_rows(before.manifest, folder, source):
        there = before.manifest.fields.get(INPUT_PATH)
        differences = [f"its rows were those of {there}, and no row of {source.path} is among them"]
    if differences:
        raise _refusal(
            output,
            f"belongs to another job: {'; '.join(differences)}. Choose another output.path, or "
            f"remove it together with {folder.path}",
        )
    return before


def _has_other_rows(manifest: Manifest, folder: RunFolder, source: Source) -> bool:
    """An input that has moved, or was compressed, is known by its rows: one that was looked at
    before is enough. Of an input in its old place all rows may have been edited."""
    if manifest.fields.get(INPUT_PATH) == input_path_text(source.path):
        return False
    with Finished(folder.journal) as finished:
        if not len(finished):
            return folder.output.exists()
        answered = Answered(finished, manifest.row_keys)
        return all(answered.of(raw) is None for raw in source)


_REMEDY = (
    "remove this file, and move the output away if there is one: the same job finds the rows that "
    "have ended again"
)


def read_claim(folder: RunFolder) -> Claim | None:
    """What is known of the job of a folder, None if nothing is. Raises ConfigError if its manifest
    is damaged, and StorageError if it cannot be read."""
    try:
        content = _Content.model_validate(read_json(folder.manifest))
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        message = "is no folder; the job keeps its rows in one of that name, so move it away"
        raise StorageError(f"{folder.path}: {message}") from None
    except ValidationError:
        raise _refusal(folder.manifest, f"is no manifest; {_REMEDY}") from None
    except OSError as error:
        raise StorageError(f"{folder.manifest}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        message = f"cannot be read ({reason(error)}); {_REMEDY}"
        raise _refusal(folder.manifest, message) from None
    return Claim(manifest=Manifest(fields=content.job), first=content.settled)


def _write(wanted: Claim, folder: RunFolder, *, only_new: bool) -> bool:
    """Puts a claim there in one step; says False if it is to be `only_new`, and another run was
    first."""
    draft = draft_of(folder.manifest)
    content = _Content(job=dict(wanted.manifest.fields), settled=wanted.first)
    files = Files()
    data = content.model_dump_json(indent=1).encode() + b"\n"
    try:
        with storage_errors(folder.path, needed=len(data)):
            files.make_folder(folder.path)
            with closing(NewFile(files, draft)) as file:
                file.write(data)
                file.sync()  # a name that outlives a loss of power, with nothing in it, is damage
            is_ours = not only_new or _link(draft, folder.manifest)
            if not only_new:
                files.replace(draft, folder.manifest)
            for changed in (folder.path, folder.path.parent):
                files.sync_folder(changed)
        return is_ours
    finally:
        with suppress(OSError):
            files.remove(draft)


def _link(draft: Path, target: Path) -> bool:
    """Gives a file a name, if that is still free. Where a file system has no links, the last
    run is believed."""
    try:
        os.link(draft, target)
    except FileExistsError:
        return False
    except OSError:
        draft.replace(target)
    return True


def _refusal(path: Path, message: str, *, where: str = "output.path") -> ConfigError:
    return ConfigError.at(path, message, where=where)
