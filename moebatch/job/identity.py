"""What decides over the answers of a job, read from its files."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from moebatch.engine.approximation import Approximation
from moebatch.engine.model_files import ModelFiles
from moebatch.errors import CheckpointError
from moebatch.folder.manifest import Manifest
from moebatch.job.fingerprint import numerics_fingerprint
from moebatch.spec.job import Job
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


def manifest_of(job: Job, files: ModelFiles, approximation: Approximation) -> Manifest:
    """The identity of `job` with the model `files` computed as `approximation` says. Raises
    CheckpointError if any of them cannot be read."""
    fields = {
        "model": numerics_fingerprint(files),
        "model.weights": weights_sample(files.checkpoint),
        "tokenizer": _digest([job.model.path / name for name in _TOKENIZER_FILES]),
        "model.chat_template": _digest([p for p in (job.model.chat_template,) if p]),
        "model.name": str(job.model.name),
        "input.path": str(job.input.path),
        "output.format": job.output.format,
        "output.column": job.output.column,
        **approximation.fields,
    }
    for name, value in job.sampling:
        fields[f"sampling.{name}"] = _stable(value)
    return Manifest(fields=fields)


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
