"""What decides over the answers of a job, read from its files."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from moebatch.checkpoint.fingerprint import checkpoint_fingerprint
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation import EXACT, Approximation
from moebatch.folder.claim import GENERATION, Manifest
from moebatch.job.job_fields import digest_of, job_fields, stable
from moebatch.rows.parameters import model_defaults
from moebatch.rows.prompts import read_generation_config
from moebatch.rows.tokenizer_files import own_tokenizer
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
    return Manifest(
        fields={
            "model": numerics_fingerprint(files),
            "model.weights": files.sample,
            "tokenizer": _tokenizer(job, files),
            GENERATION: _generation(job, files),
            **job_fields(job),
            **approximation.fields,
        }
    )


def numerics_fingerprint(files: ModelFiles, approximation: Approximation = EXACT) -> str:
    """Stands for what decides over the numbers: configuration, tensors, dtype, and what is left out
    of the arithmetic.

    Weights themselves are not read for it: names, shapes, places and file sizes must do.
    """
    digest = checkpoint_fingerprint(files.config, files.checkpoint)
    parts = ("moebatch", str(files.dtype).removeprefix("torch."), digest, approximation.fingerprint)
    return "-".join(part for part in parts if part)


def _tokenizer(job: Job, files: ModelFiles) -> str:
    """The files that it is read from; of a GGUF file its header."""
    if own_tokenizer(job.model.folder, files.checkpoint.gguf_file):
        header = files.checkpoint.first_header()
        return hashlib.blake2b(header, digest_size=8).hexdigest()
    return digest_of(dict(_tokenizer_files(job.model.folder)))


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
    return stable(said)
