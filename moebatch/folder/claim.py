"""Whose a run folder is: a job claims its output before it touches anything."""

import json
import os
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moebatch.errors import ConfigError, Fault, StorageError
from moebatch.folder.answered import Answered
from moebatch.folder.manifest import INPUT_PATH, Manifest
from moebatch.folder.run_folder import RunFolder
from moebatch.folder.settled import Settled
from moebatch.journal.finished import Finished
from moebatch.quoting import reason
from moebatch.rows.raw import Source
from moebatch.spec.json_file import read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What the manifest of a run folder says."""

    manifest: Manifest
    settled: Settled

    def joined(self, later: Settled) -> "Claim":
        """What it says when a `later` run of the same job comes."""
        return replace(self, settled=self.settled.joined(later))


def claim(manifest: Manifest, output: Path, source: Source, ours: Settled) -> Claim:
    """Makes the run folder of `output` that of a job, and returns what holds for all of its runs:
    its own manifest and `ours`, or what an earlier one has left there.

    Raises ConfigError, before anything is touched, if the output is of another job or not known to
    be of this one, and StorageError if the folder cannot be written.
    """
    folder = RunFolder(output)
    for _ in range(2):
        before = require_own(manifest, output, source)
        wanted = before.joined(ours) if before else Claim(manifest=manifest, settled=ours)
        there = read_claim(folder)
        if there == wanted or _write(wanted, folder, only_new=there is None):
            return wanted
    raise StorageError(f"{folder.manifest}: other runs keep writing it")


def require_own(manifest: Manifest, output: Path, source: Source) -> Claim | None:
    """What earlier runs of a job have left, None if there were none.

    Raises ConfigError unless `output` is free or an earlier answer to this job, and what reading
    the input raises. A run that ended before its first row binds nobody: its job may be changed and
    run again.
    """
    folder = RunFolder(output)
    before = read_claim(folder)
    if before is None:
        if output.exists():
            message = "exists, and no job has written it; choose another, or move it away"
            raise _refusal(output, message)
        return None
    differences = manifest.differences(before.manifest)
    if not output.exists() and not folder.has_records:
        return None if differences else before
    if not differences and _has_other_rows(before.manifest, output, source):
        there = before.manifest.fields.get(INPUT_PATH)
        differences = [f"its rows were those of {there}, and no row of {source.path} is among them"]
    if differences:
        raise _refusal(
            output,
            f"belongs to another job: {'; '.join(differences)}. Choose another output.path, or "
            f"remove it together with {folder.path}",
        )
    return before


def _has_other_rows(manifest: Manifest, output: Path, source: Source) -> bool:
    """An input that has moved, or was compressed, is known by its rows: one that was looked at
    before is enough. Of an input in its old place all rows may have been edited."""
    if manifest.fields.get(INPUT_PATH) == str(source.path):
        return False
    with Finished(RunFolder(output).journal) as finished:
        if not len(finished):
            return output.exists()
        answered = Answered(finished, manifest.row_keys)
        return all(answered.of(raw) is None for raw in source)


def read_claim(folder: RunFolder) -> Claim | None:
    """What is known of the job of a folder, None if nothing is. Raises ConfigError if its manifest
    is damaged."""
    try:
        content = read_json(folder.manifest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        message = f"cannot be read ({reason(error)}); remove its folder"
        raise _refusal(folder.manifest, message) from None
    fields, settled = _parts(content)
    if fields is None or settled is None:
        raise _refusal(folder.manifest, "is no manifest; remove its folder")
    return Claim(manifest=Manifest(fields=fields), settled=settled)


def _parts(content: Any) -> tuple[dict[str, str] | None, Settled | None]:
    if not isinstance(content, dict) or not isinstance(content.get("job"), dict):
        return None, None
    fields = {str(name): str(value) for name, value in content["job"].items()}
    return fields, Settled.from_json(content.get("settled"))


def _write(wanted: Claim, folder: RunFolder, *, only_new: bool) -> bool:
    """Puts a claim there in one step; says False if it is to be `only_new`, and somebody else was
    first."""
    draft = folder.path / f".manifest.{uuid.uuid4().hex}"
    content = {"job": dict(wanted.manifest.fields), "settled": wanted.settled.as_json()}
    try:
        folder.path.mkdir(exist_ok=True)
        draft.write_text(json.dumps(content, indent=1) + "\n")
        if only_new:
            return _link(draft, folder.manifest)
        draft.replace(folder.manifest)
        return True
    except OSError as error:
        raise StorageError(f"{folder.path}: cannot be written: {error.strerror}") from error


def _link(draft: Path, target: Path) -> bool:
    """Gives a file a name, if that is still free. Where a file system has no links, whoever comes
    last is believed."""
    try:
        os.link(draft, target)
    except FileExistsError:
        return False
    except OSError:
        draft.replace(target)
        return True
    finally:
        draft.unlink(missing_ok=True)
    return True


def _refusal(path: Path, message: str) -> ConfigError:
    return ConfigError([Fault(file=str(path), where="output.path", message=message)])
