"""Checksums of a model's files, where there are any."""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from moebatch.errors import CheckpointError
from moebatch.quoting import shown
from moebatch.spec.files.json_file import readable

SUMS_NAME = "SHA256SUMS"
_LINE = re.compile(r"\\?([0-9a-fA-F]{64}) [ *](.+)")
"""A backslash begins that of a name in which there is one, or a line break."""
_HASH = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 2**24
_MAX_FAULTS = 8


def known_checksums(folder: Path, files: Mapping[str, Path]) -> dict[str, str]:
    """SHA-256 in hex of those of `files`, by their names in the folder, of which it is known.

    From ``SHA256SUMS`` or ``NAME.sha256`` beside them, as ``sha256sum`` writes them; and in the
    Hugging Face cache from the names of the blobs. Raises CheckpointError if a list is damaged.
    """
    known = {name: path.name for name, path in files.items() if _HASH.fullmatch(path.name)}
    for listed in (folder / SUMS_NAME, *(folder / f"{name}.sha256" for name in files)):
        if listed.is_file():
            known.update((n, s) for n, s in _listed(listed).items() if n in files)
    return known


def require_checksums(
    known: Mapping[str, str], files: Mapping[str, Path], read: Callable[[int], None]
) -> None:
    """Reads `files` from end to end; `read` gets numbers of bytes as they are read. Raises
    CheckpointError, with every file whose bytes are not those that they should be."""
    faults = []
    for name, expected in known.items():
        found = _sha256(files[name], read)
        if found != expected.lower():
            faults.append(f"{name}: its SHA-256 is {found}, expected {expected.lower()}")
    if faults:
        shown = "\n  ".join(faults[:_MAX_FAULTS])
        raise CheckpointError(f"damaged files, fetch them again:\n  {shown}")


def _listed(path: Path) -> dict[str, str]:
    sums = {}
    try:
        with readable(path):
            text = path.read_text(encoding="utf-8-sig")
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    for line in map(str.strip, text.split("\n")):
        if not line or line.startswith("#"):
            continue  # as sha256sum does where it checks
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{path}: not a list of SHA-256 checksums: {shown(line)}")
        sums[match[2].removeprefix("./")] = match[1]
    return sums


def _sha256(path: Path, read: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with readable(path), path.open("rb", buffering=0) as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
            read(len(data))
    return digest.hexdigest()
