"""The profile of this machine, kept for the next run."""

import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from moebatch.errors import StorageError
from moebatch.spec.profile import HardwareProfile, load_profile

UNKNOWN_MACHINE = "generic-cpu"
NO_PROFILE = (
    "no profile of this machine yet: planned with rough figures; "
    "`moebatch profile` measures it in two minutes"
)


def machine_profile_path(environ: Mapping[str, str], hostname: str) -> Path:
    """Where the profile of the machine of that name is kept: in the user's cache, by hostname,
    since homes are shared among the nodes of a cluster."""
    cache = environ.get("XDG_CACHE_HOME", "")
    home = environ.get("HOME") or str(Path.home())
    # Relative paths there are to be ignored, says the XDG base directory specification.
    base = Path(cache) if Path(cache).is_absolute() else Path(home, ".cache")
    return base / "moebatch" / f"hardware-{hostname.replace(os.sep, '-') or 'unnamed'}.yaml"


def this_machine_path() -> Path:
    """`machine_profile_path` of the machine and the environment of this process."""
    return machine_profile_path(os.environ, socket.gethostname())


def save_profile(profile: HardwareProfile, path: Path) -> None:
    """Writes the profile, whole or not at all. Raises StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(profile.to_yaml())
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def load_saved(path: Path | None = None) -> HardwareProfile | None:
    """The profile at `path`, by default that of this machine; None where there is no file.

    Raises ConfigError where there is one that cannot be read as a profile.
    """
    path = path or this_machine_path()
    return load_profile(path) if path.is_file() else None


def machine_profile() -> tuple[HardwareProfile, tuple[str, ...]]:
    """The profile of this machine, or rough figures with a note that says so.

    Raises ConfigError where there is a saved one that cannot be read.
    """
    saved = load_saved()
    return (load_profile(UNKNOWN_MACHINE), (NO_PROFILE,)) if saved is None else (saved, ())
