"""The profile of this machine, kept for the next run."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from moebatch.errors import StorageError
from moebatch.quoting import system_reason
from moebatch.spec.files.text_file import is_no_regular_file, is_read_only, write_text
from moebatch.spec.machine.profile import HardwareProfile, load_profile

UNKNOWN_MACHINE = "generic-cpu"
NO_PROFILE = (
    "no profile of this machine yet: planned with rough figures; "
    "`moebatch profile` measures it in three minutes"
)


def machine_profile_path(environ: Mapping[str, str], hostname: str) -> Path:
    """Where the profile of the machine of that name is kept: in the user's cache, by hostname,
    since homes are shared among the nodes of a cluster.

    Raises RuntimeError for users without a home.
    """
    cache = environ.get("XDG_CACHE_HOME", "")
    home = environ.get("HOME") or str(Path.home())
    # Relative paths there are to be ignored, says the XDG base directory specification.
    base = Path(cache) if Path(cache).is_absolute() else Path(home, ".cache")
    return base / "moebatch" / f"hardware-{hostname.replace(os.sep, '-') or 'unnamed'}.yaml"


def this_machine_path() -> Path:
    """`machine_profile_path` of the machine and the environment of this process.

    Raises StorageError for users without a home.
    """
    try:
        return machine_profile_path(os.environ, socket.gethostname())
    except RuntimeError as error:
        message = f"there is no place for this machine's profile: {error}; give one with -o"
        raise StorageError(message) from error


def require_writable_file(path: Path) -> None:
    """Makes the folder of a file that is to be written later. Raises StorageError if it will not
    be possible."""
    try:
        is_kept = is_no_regular_file(path)
        needed = path if is_kept else path.resolve().parent
        if not is_kept:
            needed.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        is_file = isinstance(error, FileExistsError)
        why = f"{needed} is no folder" if is_file else system_reason(error)
        message = f"{path}: cannot be written: {why}; give another place"
        raise StorageError(message) from error
    if path.is_dir():
        raise StorageError(f"{path}: is a folder; give the path of a file")
    if not os.access(needed, os.W_OK):
        why = "the file system is read-only" if is_read_only(needed) else "no permission"
        raise StorageError(f"{path}: cannot be written: {why}; give another place")


def save_profile(profile: HardwareProfile, path: Path) -> None:
    """Writes the profile, whole or not at all. Raises StorageError, and ConfigError if a figure is
    none that could be read again."""
    profile.require_believable()
    require_writable_file(path)
    write_text(path, profile.to_yaml())


def load_saved(path: Path | None = None) -> HardwareProfile | None:
    """The profile at `path`, by default that of this machine; None where there is no file, or no
    way to look.

    Raises ConfigError where there is one that cannot be read as a profile.
    """
    try:
        path = path or this_machine_path()
        there = path.is_file()
    except (OSError, StorageError):
        return None
    return load_profile(path) if there else None


def machine_profile() -> tuple[HardwareProfile, tuple[str, ...]]:
    """The profile of this machine, or rough figures with a note that says so.

    Raises ConfigError where there is a saved one that cannot be read.
    """
    saved = load_saved()
    return (load_profile(UNKNOWN_MACHINE), (NO_PROFILE,)) if saved is None else (saved, ())
