"""What a run folder belongs to: everything about a job that decides over its answers."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from moebatch.engine.model_files import ModelFiles
from moebatch.errors import CheckpointError
from moebatch.job.fingerprint import numerics_fingerprint
from moebatch.job.row_key import RowKeys
from moebatch.spec.job import Job
from moebatch.spec.limits import shown
from moebatch.store.fingerprint import weights_sample

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Identity of a job: two jobs with equal fields give the same answers to the same rows."""

    fields: Mapping[str, str]
    """By the names under which a user knows them."""

    @classmethod
    def of(cls, job: Job, files: ModelFiles) -> "Manifest":
        """The identity of `job` with the model `files`. Raises CheckpointError if any of them
        cannot be read."""
        fields = {
            "model": numerics_fingerprint(files),
            "model.weights": weights_sample(files.checkpoint),
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

    @cached_property
    def row_keys(self) -> RowKeys:
        """What the rows of this job are known by."""
        text = json.dumps(dict(self.fields), sort_keys=True)
        return RowKeys(hashlib.blake2b(text.encode(), digest_size=32).digest())

    def differences(self, other: "Manifest") -> list[str]:
        """Fields that are not as in `other`, with both values."""
        names = sorted(self.fields.keys() | other.fields.keys())
        return [
            f"{name} was {shown(other.fields.get(name))}, is {shown(self.fields.get(name))}"
            for name in names
            if self.fields.get(name) != other.fields.get(name)
        ]


def _digest(paths: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        try:
            digest.update(path.name.encode() + path.read_bytes())
        except (FileNotFoundError, IsADirectoryError):
            continue
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _stable(value: object) -> str:
    """A value of the job file as text, whatever order its sets and mappings are in."""
    if isinstance(value, Mapping):
        return json.dumps({str(k): _stable(v) for k, v in value.items()}, sort_keys=True)
    if isinstance(value, frozenset):
        return str(sorted(value))
    return str(value)
