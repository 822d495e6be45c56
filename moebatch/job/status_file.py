"""How far a run is, as a file that others can read while it goes on and after it has ended."""

import functools
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from moebatch.errors import Stopped, StorageError
from moebatch.folder.shard import Shard
from moebatch.job.status import RunStatus
from moebatch.periodic import periodically
from moebatch.spec.files.json_file import read_json
from moebatch.spec.files.text_file import write_text

_INTERVAL_S = 10.0
FRESH_S = 60.0
"""A run elsewhere that has not written for so long has ended, or is out of reach."""


@dataclass(frozen=True, kw_only=True, slots=True, config=ConfigDict(strict=True, extra="forbid"))
class ShardStatus:
    """What a run has last said of itself."""

    shard: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}/[1-9][0-9]{0,8}$")]
    state: str
    """A phase, or how it ended."""
    rows: int
    done: int
    failed: int
    rows_per_s: float
    tokens_per_s: float
    """Generated, since its first pass."""
    host: str
    pid: int
    job_id: str | None
    updated: float
    """Unix time."""
    eta_s: float = -1.0
    """Seconds that were left of its rows then; negative where that was not known."""
    fruitless: int = 0
    """Runs in a row, this one the last, that were stopped before anything was gained."""
    foresight: dict[str, dict[str, int]] = field(default_factory=dict)
    """By layer, what was asked for, was there, was foreseen and so on; empty where all experts have
    stayed."""
    sight: str = ""
    """From where the number of its process means something."""
    started: int = 0
    """When its process began, as the kernel counts: numbers are given again."""

    @property
    def of(self) -> Shard:
        return Shard(*map(int, self.shard.split("/")))

    @property
    def has_ended(self) -> bool:
        """Whether the run itself has written that it has ended."""
        return self.state in _ENDS

    @property
    def left_s(self) -> float | None:
        """Seconds that are left of its rows now; None where that is not known."""
        return max(0.0, self.eta_s - (time.time() - self.updated)) if self.eta_s >= 0 else None

    @property
    def is_alive(self) -> bool:
        """Whether it is still running: where its process can be seen, that is known; elsewhere it
        was a moment ago."""
        if self.has_ended:
            return False
        seen = _is_running(self.pid, self.started) if self.sight == _sight() else None
        return time.time() - self.updated < FRESH_S if seen is None else seen


_ENDS = ("done", "stopped", "failed")
_PROC = Path("/proc")


@contextmanager
def written_to(path: Path, shard: Shard, source: Callable[[], RunStatus]) -> Iterator[None]:
    """Writes what `source` says every ten seconds while the block runs, and how that ended. What
    cannot be written is left out: it is for information only. A `Stopped` that has gained nothing
    learns how many runs before it did not either."""
    before = read_status(path)
    fruitless = before.fruitless if before else 0

    def write(end: str | None = None) -> None:
        _write(path, shard, source(), end, fruitless)

    end = "failed"
    try:
        with periodically(write, _INTERVAL_S, thread="status"):
            write()
            yield
        end, fruitless = "done", 0
    except Stopped as stopped:
        stopped.num_fruitless += fruitless if stopped.num_fruitless else 0
        end, fruitless = "stopped", stopped.num_fruitless
        raise
    finally:
        write(end)


def read_status(path: Path) -> ShardStatus | None:
    """None if there is no such file, or another kind of content."""
    try:
        return ShardStatus(**read_json(path))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, shard: Shard, now: RunStatus, end: str | None, fruitless: int) -> None:
    elapsed_s = now.elapsed_s or math.inf
    status = ShardStatus(
        shard=str(shard),
        state=end or now.phase,
        rows=now.num_rows,
        done=now.num_done,
        failed=now.num_failed,
        rows_per_s=now.num_ended / elapsed_s,
        tokens_per_s=now.engine.generated_tokens / elapsed_s,
        host=socket.gethostname(),
        pid=os.getpid(),
        job_id=os.environ.get("SLURM_JOB_ID"),
        sight=_sight(),
        started=_started(os.getpid()),
        updated=time.time(),
        eta_s=-1.0 if now.eta_s is None else now.eta_s,
        fruitless=fruitless,
        foresight={str(layer): asdict(counts) for layer, counts in now.foresight.items()},
    )
    try:
        write_text(path, _text(status))
    except StorageError:
        if end is not None:
            _note_end(path, end, fruitless)


def _text(status: ShardStatus) -> str:
    return json.dumps(asdict(status)) + "\n"


def _note_end(path: Path, end: str, fruitless: int) -> None:
    """Where there is no room for another file, what was said last stays but for how the run ended:
    that needs no more room than there is."""
    last = read_status(path)
    if last is None:
        return
    data = _text(replace(last, state=end, fruitless=fruitless)).encode()
    with suppress(OSError), path.open("r+b") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if len(data) <= num_bytes:
            file.write(data.ljust(num_bytes))


@functools.cache
def _sight() -> str:
    """The same wherever the number of this process is that of the same process: a container on the
    same host may count for itself, and another host may have the same name."""
    with suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    return ""


def _is_running(pid: int, started: int) -> bool | None:
    """Whether the process that had this number then is still there; None where that is hidden."""
    try:
        return 0 != _started(pid) == started
    except (FileNotFoundError, ProcessLookupError):
        # A system may hide other users' processes: that of all of them is then hidden, too.
        return False if (_PROC / "1").exists() else None
    except OSError:
        return None


def _started(pid: int) -> int:
    """Ticks after the boot; 0 for one that has ended and is not buried yet. Raises OSError."""
    state, *numbers = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return 0 if state in "ZX" else int(numbers[18])
