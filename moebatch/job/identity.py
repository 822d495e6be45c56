"""What decides over the answers of a job, read from its files."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from moebatch.checkpoint.fingerprint import checkpoint_fingerprint, weights_sample
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation import EXACT, Approximation
from moebatch.errors import CheckpointError
from moebatch.folder.claim import GENERATION, INPUT_PATH, Manifest, input_path_text
from moebatch.rows.parameters import model_defaults
from moebatch.rows.prompts import read_generation_config
from moebatch.rows.tokenizer_files import MOST_FILE_BYTES, own_tokenizer
from moebatch.spec.files.json_file import read_regular
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
"""What most models have."""
_OTHER_TOKENIZER_FILES = ("added_tokens.json", "chat_template.json", "tekken.json", "vocab.txt")
_OTHER_TOKENIZERS = ("*.model", "*.tiktoken", "chat_template*/*")


def manifest_of(job: Job, files: ModelFiles, approximation: Approximation) -> Manifest:
    """The identity of `job` with the model `files` computed as `approximation` says. Raises
    CheckpointError if any of them cannot be read."""
    template = job.model.chat_template
    fields = {
        "model": numerics_fingerprint(files),
        "model.weights": weights_sample(files.checkpoint),
        "tokenizer": _tokenizer(job, files),
        GENERATION: _generation(job, files),
        "model.chat_template": _digest({"": template} if template else {}),
        "model.name": str(job.model.name),
        INPUT_PATH: input_path_text(job.input.path),
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


def _tokenizer(job: Job, files: ModelFiles) -> str:
    """The files that it is read from; of a GGUF file its header."""
    if own_tokenizer(job.model.folder, files.checkpoint.gguf_file):
        header = files.checkpoint.first_header()
        return hashlib.blake2b(header, digest_size=8).hexdigest()
    return _digest(dict(_tokenizer_files(job.model.folder)))


def _tokenizer_files(folder: Path) -> Iterator[tuple[str, Path]]:
    names = [*_TOKENIZER_FILES, *_OTHER_TOKENIZER_FILES]
    found = sorted(path for pattern in _OTHER_TOKENIZERS for path in folder.glob(pattern))
    for name in dict.fromkeys([*names, *(str(path.relative_to(folder)) for path in found)]):
        yield name, folder / name


def _generation(job: Job, files: ModelFiles) -> str:
    """What the model itself says about sampling and about where answers begin and end."""
    shape = files.shape
    start_token = shape.encoder.start_token if shape.encoder else None
    config = read_generation_config(
        job.model.folder, vocab_size=shape.vocab_size, start_token=start_token
    )
    said = {**model_defaults(config.values), "eos_token_id": config.end_tokens}
    if config.start_token != start_token:
        said["decoder_start_token_id"] = config.start_token
    return _stable(said)


def _digest(paths: Mapping[str, Path]) -> str:
    """Stands for what is in those files that exist, and for what they are to the job."""
    digest = hashlib.blake2b(digest_size=8)
    for name, path in paths.items():
        try:
            digest.update(name.encode() + read_regular(path, most_bytes=MOST_FILE_BYTES))
        except (FileNotFoundError, IsADirectoryError):
            continue
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return digest.hexdigest()


def _stable(value: object) -> str:
    """A value of the job file as text, whatever order its sets and mappings are in."""
    if isinstance(value, Mapping):
        return json.dumps({str(k): _stable(v) for k, v in value.items()}, sort_keys=True)
    if isinstance(value, frozenset):
        return str(sorted(value))
    return str(value)
