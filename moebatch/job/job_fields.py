"""What the job file alone says of the answers, of all that decides over them."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from moebatch.errors import CheckpointError, model_file_error
from moebatch.folder.claim import INPUT_PATH, Manifest, input_path_text
from moebatch.rows.tokenizer_files import MOST_FILE_BYTES
from moebatch.spec.files.json_file import read_regular
from moebatch.spec.job import Job

_UNLESS_SAID: Mapping[str, object] = {
    "input.prompt": None,
    "input.chat": False,
    "output.reasoning": "separate",
    "output.tool_calls": "separate",
    "sampling.response_format": None,
    "sampling.structured_outputs": None,
    "sampling.tools": None,
    "sampling.tool_choice": None,
    "sampling.parallel_tool_calls": None,
}
"""Fields that a job has only if it says anything else of them."""


def job_fields(job: Job) -> dict[str, str]:
    """Fields of a manifest. Raises CheckpointError if the chat template cannot be read."""
    template = job.model.chat_template
    said: Mapping[str, object] = {
        "input.prompt": job.input.prompt,
        "input.chat": job.input.chat,
        "output.format": job.output.format,
        "output.column": job.output.column,
        "output.reasoning": job.output.reasoning,
        "output.tool_calls": job.output.tool_calls,
        **{f"sampling.{name}": value for name, value in job.sampling},
    }
    always = object()
    return {
        "model.chat_template": digest_of({"": template} if template else {}),
        "model.name": str(job.model.name),
        INPUT_PATH: input_path_text(job.input.path),
        **{
            name: stable(value)
            for name, value in said.items()
            if value != _UNLESS_SAID.get(name, always)
        },
    }


def supposed_manifest(job: Job, before: Manifest) -> Manifest:
    """That of a job if its model is what it was. Raises what `job_fields` raises."""
    kept = {name: before.fields[name] for name in before.fields if name not in _UNLESS_SAID}
    return Manifest(fields={**kept, **job_fields(job)})


def digest_of(paths: Mapping[str, Path]) -> str:
    """Stands for what is in those files that exist, and for what they are to the job."""
    digest = hashlib.blake2b(digest_size=8)
    for name, path in paths.items():
        try:
            digest.update(name.encode() + read_regular(path, most_bytes=MOST_FILE_BYTES))
        except (FileNotFoundError, IsADirectoryError):
            continue
        except OSError as error:
            raise model_file_error(error, f"{path}: cannot be read") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return digest.hexdigest()


def stable(value: object) -> str:
    """A value of the job file as text, whatever order its sets and mappings are in."""
    if isinstance(value, Mapping):
        return json.dumps({str(k): stable(v) for k, v in value.items()}, sort_keys=True)
    if isinstance(value, frozenset):
        return str(sorted(value))
    return str(value)
