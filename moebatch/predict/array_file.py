"""Arrays with a description in one safetensors file, most of them beside the model of which they
were learnt: written whole, refused when damaged, stale or of another model."""

import json
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.checkpoint.header import read_header
from moebatch.errors import CheckpointError, StorageError
from moebatch.quoting import reason, shown
from moebatch.spec.files.text_file import write_bytes

_KEY = "moebatch"
Arrays = Mapping[str, NDArray[Any]]
Description = Mapping[str, Any]
Sizes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and type of each array, by its name."""
SizesOf = Callable[[Description, Arrays], Sizes | None]
"""What a file must hold that says so of itself; None if it says nothing of use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """A kind of file, most of them beside a model."""

    title: str
    """Such as ``correlation table``."""
    file: str
    """Its name, without the ending."""
    version: int
    remedy: str
    """What makes one, with {folder} for that of the model."""
    holds_amounts: bool = False
    """Whether all of its numbers are finite and none is negative."""

    def path(self, folder: Path) -> Path:
        """Where that of a model is kept."""
        return folder / "moebatch" / self.file_name

    def beside(self, path: Path) -> Path:
        """Where the one goes that is written together with `path`."""
        return path.with_name(self.file_name)

    @property
    def file_name(self) -> str:
        """How it is called."""
        return f"{self.file}.safetensors"

    def save(self, path: Path, owner: ModelOwner | None, arrays: Arrays, **further: object) -> None:
        """Writes it, whole or not at all. Raises StorageError."""
        of_model = {} if owner is None else owner.description
        dated = {} if owner is None else {"date": date.today().isoformat()}
        description = {"kind": self.title, "version": self.version, **of_model, **further, **dated}
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        write_bytes(path, save(contiguous, metadata={_KEY: json.dumps(description)}))

    def load(
        self, path: Path, owner: ModelOwner | None, sizes_of: SizesOf
    ) -> tuple[Arrays, Description]:
        """Arrays and description of a file, if it is one of that model.

        Raises CheckpointError where it is missing, damaged, of another model or stale.
        """
        try:
            arrays, description = _read(path)
        except (CheckpointError, StorageError) as error:
            raise CheckpointError(f"{error}; {self._advice(owner)}") from None
        fault = self._fault(arrays, description, owner, sizes_of)
        if fault:
            raise self.refusal(path, owner, fault)
        return arrays, description

    def is_of(self, path: Path) -> bool:
        """Whether a file says that it is one of these, in whatever state, of whatever model."""
        with suppress(OSError, SafetensorError), safe_open(path, framework="np") as file:
            return (_description(file.metadata()) or {}).get("kind") == self.title
        return False

    def refusal(self, path: Path, owner: ModelOwner | None, fault: str) -> CheckpointError:
        """Says why a file is of no use, and what to do."""
        return CheckpointError(f"{path}: {fault}; {self._advice(owner)}")

    def _fault(
        self, arrays: Arrays, found: Description, owner: ModelOwner | None, sizes_of: SizesOf
    ) -> str | None:
        if found.get("kind") != self.title:
            return f"is no {self.title}"
        if found.get("version") != self.version:
            return f"is of version {shown(found.get('version'))}, this program reads {self.version}"
        if owner and any(found.get(name) != value for name, value in owner.description.items()):
            return "was made for another model, or for another state of this one"
        sizes = sizes_of(found, arrays)
        if sizes is None:
            return "its description is damaged"
        return _size_fault(arrays, sizes) or (self.holds_amounts and _number_fault(arrays)) or None

    def _advice(self, owner: ModelOwner | None) -> str:
        return self.remedy.format(folder=shlex.quote(str(owner.folder)) if owner else "")


def _read(path: Path) -> tuple[Arrays, Description]:
    """Arrays and description. Raises CheckpointError where the file is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    read_header(path)  # names the rule that a damaged file breaks
    try:
        with safe_open(path, framework="np") as file:
            description = _description(file.metadata())
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, TypeError, AttributeError) as error:
        # The latter two are for types that numpy does not have, such as BF16.
        raise CheckpointError(f"{path}: cannot be read: {reason(error)}") from None
    if description is None:
        raise CheckpointError(f"{path}: does not say what it holds")
    return arrays, description


def _description(metadata: Mapping[str, str] | None) -> Description | None:
    """What a file says of itself; None where that is nothing of use."""
    try:
        description = json.loads((metadata or {}).get(_KEY, ""))
    except (ValueError, RecursionError):
        return None
    return description if isinstance(description, dict) else None


def _size_fault(arrays: Arrays, sizes: Sizes) -> str | None:
    found = {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}
    for name in sorted({*found, *sizes}):
        if found.get(name) != sizes.get(name):
            have, need = (_words(of.get(name)) for of in (found, sizes))
            return f"array {shown(name)} is {have}, must be {need}"
    return None


def _words(size: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if size is None else f"{size[1]} {list(size[0])}"


def _number_fault(arrays: Arrays) -> str | None:
    for name, array in arrays.items():
        if not (np.isfinite(array).all() and (array >= 0).all()):
            return f"array {shown(name)} holds numbers that are negative, infinite or NaN"
    return None


def length_of(arrays: Arrays, name: str) -> int:
    """Of an array that a file may lack, or have as a single number; 0 then."""
    array = arrays.get(name)
    return 0 if array is None or array.ndim == 0 else len(array)


def whole_numbers(value: object) -> bool:
    """Whether a part of a description is a list of numbers of layers or of sizes."""
    return isinstance(value, list) and all(is_whole(item) for item in value)


def is_whole(value: object) -> bool:
    """Whether a part of a description is a number of things."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
