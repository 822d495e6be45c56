"""Files beside a model, of what was learnt of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.errors import CheckpointError
from moebatch.predict.array_file import read_arrays, write_arrays
from moebatch.quoting import shown

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of file beside a model."""

    title: str
    """Such as ``correlation table``."""
    file: str
    """Its name, without the ending."""
    version: int
    remedy: str
    """The command that makes one, with {folder} for that of the model."""

    def path(self, folder: Path) -> Path:
        """Where that of a model is kept."""
        return folder / "moebatch" / self.file_name

    @property
    def file_name(self) -> str:
        """How it is called."""
        return f"{self.file}.safetensors"

    def save(self, path: Path, owner: ModelOwner, arrays: Arrays, **further: object) -> None:
        """Writes it, whole or not at all. Raises StorageError."""
        description = {
            "kind": self.title,
            "version": self.version,
            **owner.description,
            **further,
            "date": date.today().isoformat(),
        }
        write_arrays(path, arrays, description)

    def load(self, path: Path, owner: ModelOwner) -> tuple[Arrays, dict[str, Any]]:
        """Arrays and description of a file, if it is one of that model.

        Raises CheckpointError where it is missing, damaged, of another model or stale.
        """
        try:
            arrays, description = read_arrays(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self._advice(owner)}") from None
        reason = self._reason(description, owner)
        if reason:
            raise self.refusal(path, owner, reason)
        return arrays, description

    def refusal(self, path: Path, owner: ModelOwner, reason: str) -> CheckpointError:
        """Says why a file is of no use, and what to do."""
        return CheckpointError(f"{path}: {reason}; {self._advice(owner)}")

    def _reason(self, found: Mapping[str, Any], owner: ModelOwner) -> str | None:
        if found.get("kind") != self.title:
            return f"is no {self.title}"
        if found.get("version") != self.version:
            return f"is of version {shown(found.get('version'))}, this program reads {self.version}"
        if any(found.get(name) != value for name, value in owner.description.items()):
            return "was made for another model, or for another state of this one"
        return None

    def _advice(self, owner: ModelOwner) -> str:
        return f"run `{self.remedy.format(folder=owner.folder)}`"
