"""Who is writing an output: one run at a time, or one for each shard."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any, Self

from moebatch.errors import LockHeld, StorageError
from moebatch.periodic import periodically

_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_HEARTBEAT_S = 10.0
_STALE_S = 120.0
"""A holder that has not been heard of for so long is gone, where only its heart beat tells."""
_LISTEN_S = 3 * _HEARTBEAT_S
"""By the clock of another host, that is; so its heart is listened to for so long."""


_SHARED = "runs of its shards are using it (`moebatch status` names them)"


class RunLock:
    """A file that is locked while this process lives, whatever becomes of it.

    Where the file system knows no locks there is a file beside it that only one can create, kept
    fresh by a thread; one that has not been touched for two minutes is taken over.
    """

    def __init__(
        self,
        path: Path,
        *,
        subject: str,
        shared: bool = False,
        elsewhere: str = "another output.path",
    ) -> None:
        """`subject` is what is locked and `elsewhere` what to choose instead, for messages;
        `shared` holders bear others of their kind.

        Raises LockHeld with who holds it, and StorageError.
        """
        self._path = path
        self._subject = subject
        self._elsewhere = elsewhere
        self._shared = shared
        self._stand_in: tuple[Path, int] | None = None
        """The file that stands in for a lock, and its descriptor; None where there are locks."""
        while True:
            with contextlib.ExitStack() as self._held:
                self._descriptor = _opened(self._path, os.O_RDWR)
                self._held.callback(os.close, self._descriptor)
                self._lock()
                # An earlier holder may have removed it meanwhile.
                if _is_found(self._path, self._descriptor):
                    self._held = self._held.pop_all()
                    return

    def require_held(self) -> None:
        """Raises LockHeld if another one has taken over what stands in for a lock: this process was
        suspended, and its heart was silent."""
        if self._stand_in is not None and not _is_found(*self._stand_in):
            raise LockHeld(
                f"{self._subject}: another run has taken it over, since this one was not heard of "
                f"for {_STALE_S:.0f} s; what it has computed is kept"
            )

    def release(self) -> None:
        """Lets others in."""
        with contextlib.suppress(OSError):  # the folder may be gone
            self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.release()

    def _lock(self) -> None:
        kind = fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockHeld(self._held_by(_holder_in(self._path), is_known_alive=True)) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise StorageError(f"{self._path}: cannot be locked: {error.strerror}") from error
            if not self._shared:
                self._take_by_creating()
        with contextlib.suppress(OSError):  # for information only
            # What a holder that was killed has left is no name of those that share the file.
            os.ftruncate(self._descriptor, 0)
            if not self._shared:
                os.pwrite(self._descriptor, json.dumps(_holder()).encode() + b"\n", 0)

    def _take_by_creating(self) -> None:
        path = self._path.with_name(self._path.name + ".held")
        follows = False
        while (created := _created(path)) is None:
            if follows or not _is_stale(path):
                raise self._held_meanwhile()
            path.unlink(missing_ok=True)
            follows = True
        self._held.callback(os.close, created)
        if follows:
            # Another one that follows may take it for what was left, and be late to remove it.
            time.sleep(_HEARTBEAT_S)
            if not _is_found(path, created):
                raise self._held_meanwhile()
        self._held.callback(_remove_own, path, created)
        self._stand_in = path, created
        beats = periodically(partial(_touch, created), _HEARTBEAT_S, thread="lock")
        self._held.enter_context(beats)

    def _held_meanwhile(self) -> LockHeld:
        return LockHeld(self._held_by(_holder_in(self._path), is_known_alive=False))

    def _held_by(self, holder: dict[str, Any], *, is_known_alive: bool) -> str:
        who = ", ".join(
            f"{words} {holder[key]}"
            for key, words in (("pid", "process"), ("host", "on"), ("job_id", "Slurm job"))
            if holder.get(key)
        )
        since = f" since {holder['start']}" if holder.get("start") else ""
        # Runs that share the file do not write their names into it.
        others = f"another run is using it ({who}{since})" if who else _SHARED
        message = f"{self._subject}: {others}; wait for its end, or choose {self._elsewhere}"
        if is_known_alive:
            return message
        return f"{message}. If it is gone for good: rm {self._path}.held"


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CREAT, 0o666)
    except FileExistsError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: cannot be locked: {error.strerror}") from error


def _created(path: Path) -> int | None:
    """A descriptor of a file that was not there; None if it was."""
    try:
        return _opened(path, os.O_WRONLY | os.O_EXCL)
    except FileExistsError:
        return None


def _is_found(path: Path, descriptor: int) -> bool:
    """Whether others find the very file that is open: else they lock another one of its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _remove_own(path: Path, descriptor: int) -> None:
    """Unless one that took its holder for gone, while that was suspended, has it by now."""
    if _is_found(path, descriptor):
        path.unlink()


def _touch(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        os.utime(descriptor)


def _holder() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "start": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _holder_in(path: Path) -> dict[str, Any]:
    try:
        holder = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_stale(path: Path) -> bool:
    """Whether its holder is gone; takes a while where that seems so."""
    try:
        last_beat_s = path.stat().st_mtime
        if time.time() - last_beat_s <= _STALE_S:
            return False
        time.sleep(_LISTEN_S)
        return path.stat().st_mtime == last_beat_s
    except OSError:
        return True
