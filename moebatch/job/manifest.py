"""What a run folder belongs to: everything about a job that decides over its answers."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moebatch.engine.model_files import ModelFiles
from moebatch.errors import ConfigError, Fault, StorageError
from moebatch.job.fingerprint import numerics_fingerprint
from moebatch.job.run_folder import RunFolder
from moebatch.spec.job import Job
from moebatch.spec.limits import shown

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Identity of a job: two jobs with equal fields give the same answers to the same rows."""

    fields: Mapping[str, str]
    """By the names under which a user knows them."""

    @classmethod
    def of(cls, job: Job, files: ModelFiles) -> "Manifest":
        """The identity of `job` with the model `files`."""
        fields = {
            "model": numerics_fingerprint(files),
            "tokenizer": _digest([job.model.path / name for name in _TOKENIZER_FILES]),
            "model.chat_template": _digest([p for p in (job.model.chat_template,) if p]),
            "model.name": str(job.model.name),
            "input.path": str(job.input.path),
            "output.format": job.output.format,
            "output.column": job.output.column,
        }
        for name, value in job.sampling:
            fields[f"sampling.{name}"] = _stable(value)
        return cls(fields=fields)

    def differences(self, other: "Manifest") -> list[str]:
        """Fields that are not as in `other`, with both values."""
        names = sorted(self.fields.keys() | other.fields.keys())
        return [
            f"{name} was {shown(other.fields.get(name))}, is {shown(self.fields.get(name))}"
            for name in names
            if self.fields.get(name) != other.fields.get(name)
        ]

    def claim(self, output: Path) -> None:
        """Makes the run folder of `output` that of this job.

        Raises ConfigError, before anything is touched, if the output is of another job or not
        known to be of this one, and StorageError if the folder cannot be written.
        """
        self.require_own(output)
        folder = RunFolder(output).path
        draft = folder / f"manifest.{os.getpid()}"
        try:
            folder.mkdir(exist_ok=True)
            draft.write_text(json.dumps(self.fields, indent=1) + "\n")
            draft.replace(folder / "manifest.json")
        except OSError as error:
            raise StorageError(f"{folder}: cannot be written: {error.strerror}") from error

    def require_own(self, output: Path) -> None:
        """Raises ConfigError unless `output` is free or an earlier answer to this job.

        A run that ended before its first row binds nobody: its job may be changed and run again.
        """
        folder = RunFolder(output)
        before = _read(folder.manifest)
        if before is None:
            if output.exists():
                message = "exists and is not the output of a job; remove it or choose another"
                raise _refusal(output, message)
            return
        differences = self.differences(before)
        if differences and (output.exists() or folder.has_records):
            raise _refusal(
                output,
                f"belongs to another job: {'; '.join(differences)}. Choose another output.path, "
                f"or remove it together with {folder.path}",
            )


def _refusal(output: Path, message: str) -> ConfigError:
    return ConfigError([Fault(file=str(output), where="output.path", message=message)])


def _read(path: Path) -> Manifest | None:
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _refusal(path, f"cannot be read ({error}); remove its folder") from None
    if not isinstance(fields, dict):
        raise _refusal(path, "is no manifest; remove its folder")
    return Manifest(fields={str(name): str(value) for name, value in fields.items()})


def _digest(paths: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _stable(value: object) -> str:
    """A value of the job file as text, whatever order its sets and mappings are in."""
    if isinstance(value, Mapping):
        return json.dumps({str(k): _stable(v) for k, v in value.items()}, sort_keys=True)
    if isinstance(value, frozenset):
        return str(sorted(value))
    return str(value)
