"""What decides over the answers of a job, read from its files."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from moebatch.checkpoint.fingerprint import checkpoint_fingerprint, weights_sample
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation import EXACT, Approximation
from moebatch.errors import CheckpointError
from moebatch.folder.claim import INPUT_PATH, Manifest
from moebatch.spec.job import Job

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
    template = job.model.chat_template
    fields = {
        "model": numerics_fingerprint(files),
        "model.weights": weights_sample(files.checkpoint),
        "tokenizer": _digest({name: job.model.folder / name for name in _TOKENIZER_FILES}),
        "model.chat_template": _digest({"": template} if template else {}),
        "model.name": str(job.model.name),
        INPUT_PATH: str(job.input.path),
        "output.format": job.output.format,
        "output.column": job.output.column,
        **_prompt_fields(job),
        **approximation.fields,
    }
    for name, value in job.sampling:
        fields[f"sampling.{name}"] = _stable(value)
    return Manifest(fields=fields)


def numerics_fingerprint(files: ModelFiles, approximation: Approximation = EXACT) -> str:
    """Stands for what decides over the numbers: configuration, tensors, dtype, and what is left out
    of the arithmetic.

    Weights themselves are not read for it: names, shapes, places and file sizes must do.
    """
    digest = checkpoint_fingerprint(files.config, files.checkpoint)
    parts = ("moebatch", str(files.dtype).removeprefix("torch."), digest, approximation.fingerprint)
    return "-".join(part for part in parts if part)


def _prompt_fields(job: Job) -> dict[str, str]:
    """What makes prompts of columns, as far as the job says anything about that."""
    fields = {} if job.input.prompt is None else {"input.prompt": job.input.prompt}
    return {**fields, "input.chat": "True"} if job.input.chat else fields


def _digest(paths: Mapping[str, Path]) -> str:
    """Stands for what is in those files that exist, and for what they are to the job."""
    digest = hashlib.blake2b(digest_size=8)
    for name, path in paths.items():
        try:
            digest.update(name.encode() + path.read_bytes())
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
