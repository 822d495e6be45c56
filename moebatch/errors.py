"""Every way a run can end, and its exit code.

    MoebatchError                 1   the run failed
    ├── ConfigError               2   the job file, a profile or an option is wrong
    ├── InputError                4   the input file as a whole is unusable, or was changed
    ├── CheckpointError           5   the model folder is missing, damaged or not supported
    ├── DoesNotFit                6   no plan exists within the budgets
    ├── OutOfMemory               1   the system refuses memory even for the smallest pass
    ├── LockHeld                 11   another run is using the same output
    ├── StorageError             74   disk full, or reading and writing failed
    ├── Stopped                  75   stopped early; what is done is kept, run it again to go on
    ├── Interrupted             130   stopped by the user
    └── Terminated              143   ended by SIGTERM or SIGHUP

A user's mistake raises one of these and is shown as one message, never as a traceback. Our own
mistakes are asserts.
"""

import enum
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from moebatch.quoting import presentable


class ExitCode(enum.IntEnum):
    """What the shell, cron and Slurm see. An unknown code must be treated as failure."""

    OK = 0
    FAILED = 1
    CONFIG = 2
    ROWS_FAILED = 3
    INPUT = 4
    CHECKPOINT = 5
    DOES_NOT_FIT = 6
    LOCK_HELD = 11
    STORAGE = 74
    STOPPED = 75
    INTERRUPTED = 130
    TERMINATED = 143


class MoebatchError(Exception):
    """What went wrong, where, what was needed and what is there, and what to do about it."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str) -> None:
        """The message may hold words of others; people are shown it as `presentable` makes it."""
        super().__init__(presentable(message))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One finding in a file: shown as ``file:line: where: message``."""

    file: str
    message: str
    line: int | None = None
    where: str | None = None
    """Path inside the file, such as ``resources.dram``."""
    code: str | None = None
    """Stable name for programs, such as ``duplicate_custom_id``."""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        subject = f"{self.where}: " if self.where else ""
        return f"{place}: {subject}{self.message}"


_MOST_FAULTS = 200


class FaultyFile(MoebatchError):
    """A file with one or more faults, all of them shown at once."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        assert faults, "an error about faults must carry at least one"
        kept = list(faults[:_MOST_FAULTS])
        if len(faults) > len(kept):
            kept.append(Fault(file=faults[0].file, message=f"and {len(faults) - len(kept)} more"))
        super().__init__("\n".join(map(str, kept)))
        self.faults = tuple(kept)
        """At most so many that they can be read."""

    @classmethod
    def at(
        cls,
        file: object,
        message: str,
        *,
        line: int | None = None,
        where: str | None = None,
        code: str | None = None,
    ) -> Self:
        """That of a single fault, whose file is shown as it prints."""
        return cls([Fault(file=str(file), message=message, line=line, where=where, code=code)])


class ConfigError(FaultyFile):
    """The job file, a hardware profile or an option is wrong."""

    exit_code = ExitCode.CONFIG


class InputError(FaultyFile):
    """The input file as a whole is unusable, or was changed while the job ran."""

    exit_code = ExitCode.INPUT


class CheckpointError(MoebatchError):
    """The model folder is missing, damaged, hostile or of an unsupported architecture."""

    exit_code = ExitCode.CHECKPOINT


class DoesNotFit(MoebatchError):
    """No plan exists within the budgets; the message names level, need, have and a way out."""

    exit_code = ExitCode.DOES_NOT_FIT


class OutOfMemory(MoebatchError):
    """The system refuses memory even for the smallest pass."""


class LockHeld(MoebatchError):
    """Another run is using the same output."""

    exit_code = ExitCode.LOCK_HELD


class StorageError(MoebatchError):
    """Reading or writing failed: disk full, folder gone, device error."""

    exit_code = ExitCode.STORAGE


_FAULTS_OF_FOLDERS = (
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)


def transfer_error(error: OSError, message: str) -> MoebatchError:
    """What has gone wrong where a transfer says `error`: StorageError, or OutOfMemory where the
    system had none for it, and a smaller plan may help."""
    kind = OutOfMemory if error.errno == errno.ENOMEM else StorageError
    return kind(f"{message}: {error.strerror}")


def model_file_error(error: OSError, message: str) -> MoebatchError:
    """The same of a file of a model, where CheckpointError blames the folder for what is missing in
    it or may not be read."""
    if error.errno in _FAULTS_OF_FOLDERS:
        return CheckpointError(f"{message}: {error.strerror}")
    return transfer_error(error, message)


class Stopped(MoebatchError):
    """Asked to stop by a signal, or out of time. What is done is kept: run it again to go on."""

    exit_code = ExitCode.STOPPED

    def __init__(self, message: str, *, has_gained: bool = False) -> None:
        super().__init__(message)
        self.num_fruitless = 0 if has_gained else 1
        """Runs in a row, this one the last, that computed nothing that is kept."""


class Interrupted(MoebatchError):
    """Stopped by the user before it was done."""

    exit_code = ExitCode.INTERRUPTED


class Terminated(MoebatchError):
    """Ended by SIGTERM or SIGHUP before it was done."""

    exit_code = ExitCode.TERMINATED
