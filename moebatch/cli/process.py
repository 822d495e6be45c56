"""What a command asks of its process: to stop on signals and say what is kept, to name paths that
cannot be used, and threads that sleep."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TypeVar

from moebatch.advance import Advance
from moebatch.errors import (
    ConfigError,
    ExitCode,
    Interrupted,
    MoebatchError,
    OutOfMemory,
    StorageError,
    Terminated,
)
from moebatch.journal.files import NO_ROOM
from moebatch.quoting import shown
from moebatch.report.console import error_console, logger

if TYPE_CHECKING:
    from moebatch.job.stop import Stop

Done = TypeVar("Done", covariant=True)
_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_NO_THREAD = "can't start new thread"
"""Python has no type of its own for it."""
_SOON_S = 0.01
"""After so long a signal comes again that came where an object is finalised: what is raised there
gets no further."""
_AGAIN_S = 1.0
"""So often it is looked at whether what was asked to stop is in a schedule of the user's own."""
_NO_TEMPORARY = "No usable temporary directory"
"""What Python says where every folder for what is temporary is full; torch asks for one."""
_NO_SEGMENT = "failed to map segment"
"""What the loader of libraries says where it is refused memory."""


@contextmanager
def stopping_on_signals(stop: "Stop") -> Iterator[None]:
    """While the block runs, the first signal asks for a stop, and a second one ends the process at
    once: what was finished by then is kept all the same. Shell and system both send a SIGHUP where
    a terminal is closed, and a SIGTERM may come with them: it counts neither as the first of two
    nor as the second. The clock asks where nothing else looks at it, and is no signal that a second
    one could follow. A schedule of the user's own that is at work is broken off: it may never come
    to an end."""
    from moebatch.job.stop import StopNow
    from moebatch.schedule.own_file import own_is_at_work

    is_second = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_second
        if number != signal.SIGHUP:
            if is_second:
                os._exit(ExitCode.INTERRUPTED)
            is_second = True
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        stop.ask(signal.Signals(number).name)

    def handle_clock(number: int, frame: FrameType | None) -> None:
        stop.ask_in_time(at_once=own_is_at_work(frame))

    before = {number: signal.signal(number, handle) for number in _signals() if _is_heard(number)}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, handle_clock)
    if stop.left_s is not None:
        # No time is an alarm that never comes.
        first_s = min(max(stop.left_s, 1e-6), threading.TIMEOUT_MAX)
        signal.setitimer(signal.ITIMER_REAL, first_s, _AGAIN_S)
    # One where an object is finalised is obeyed a little later.
    with _told_unless(lambda error: isinstance(error, StopNow)):
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _told_unless(is_heard: Callable[[BaseException | None], bool]) -> Iterator[None]:
    """While the block runs, what is raised where an object is finalised, and so gets no further, is
    told unless `is_heard`."""
    tell = sys.unraisablehook

    def tell_others(unraisable: "sys.UnraisableHookArgs") -> None:
        if not is_heard(unraisable.exc_value):
            tell(unraisable)

    sys.unraisablehook = tell_others
    try:
        yield
    finally:
        sys.unraisablehook = tell


def ignore_stops() -> None:
    """From here on only Ctrl-C ends the process before its time: a command has ended, and what of
    it is still to be unloaded must not change its exit code."""
    for number in _signals():
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN)


def _signals() -> list[signal.Signals]:
    return [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


def _is_heard(number: signal.Signals) -> bool:
    """Shells have what they run in the background ignore Ctrl-C, which is for what they wait for,
    and nohup what it runs a terminal that is closed. Scripts of Slurm ignore SIGUSR1 only for as
    long as the program does not listen yet."""
    may_be_ignored = number in (signal.SIGINT, signal.SIGHUP)
    return not may_be_ignored or signal.getsignal(number) is not signal.SIG_IGN


def hear_interrupts() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt, so that a command can clear up behind itself."""
    if _is_heard(signal.SIGINT):
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def explaining_refusals() -> Iterator[None]:
    """While the block runs, what the system refuses is a message: a name that no file system takes,
    a folder that this user may not look into, a disk that fails, a log or temporary files that have
    no more room, or a limit that allows too few threads or open files, or too little memory for
    what is loaded."""
    try:
        yield
    except (ImportError, MemoryError, RuntimeError, OSError) as error:
        explained = _explained(error)
        if explained is None:
            raise
        raise explained from error


def _explained(error: Exception) -> MoebatchError | None:
    match error:
        case ImportError() if _NO_SEGMENT in str(error):
            return OutOfMemory(
                f"{error}: the system refuses memory for a library; allow this process more "
                "(`ulimit -v`)"
            )
        case MemoryError():
            return OutOfMemory("the system refuses memory; allow this process more (`ulimit -v`)")
        case RuntimeError() if str(error) == _NO_THREAD:
            return MoebatchError(
                "the system starts no more threads for this process; allow it more (`ulimit -u`, "
                "`ulimit -v`, pids.max of its control group)"
            )
        case PermissionError():
            return StorageError(f"{error.filename}: cannot be reached: {error.strerror}")
        case OSError() if error.errno in NO_ROOM and error.filename is None:
            return StorageError(f"a screen or log cannot be written: {error.strerror}")
        case OSError() if _NO_TEMPORARY in str(error.strerror):
            return StorageError(f"{error.strerror}; make room, or set TMPDIR to a folder")
        case OSError(errno=errno.EIO) if error.filename is not None:
            return StorageError(f"{error.filename}: {error.strerror}")
        case OSError(errno=errno.EMFILE):
            return MoebatchError(
                f"{error.filename or 'a file'}: cannot be opened beside so many others; allow this "
                "process more (`ulimit -n`)"
            )
        case OSError(errno=errno.ENAMETOOLONG):
            message = "is longer than a path can be"
            return ConfigError.at(shown(str(error.filename)), message)
    return None


def require_current_folder() -> None:
    """Raises StorageError if the folder has been removed in which this process is: libraries end it
    with words of their own then, or none."""
    try:
        Path.cwd()
    except FileNotFoundError:
        message = "the current folder is gone; change to one that is there (`cd`)"
        raise StorageError(message) from None


class Resumable(Protocol[Done]):
    """Work of minutes: where it was broken off, the same command continues it."""

    @property
    def num_kept(self) -> int:
        """Pieces that need not be done again."""

    def execute(self) -> Done:
        """All of it."""


class _SignalledEnd(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised where Ctrl-C would be."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


def carried_out(
    begin: Callable[[Callable[[str], None], Advance], Resumable[Done]],
    *,
    doing: str,
    kept: str,
    quiet: bool,
) -> Done:
    """What work comes to, which logs lines and moves a bar, with `doing` before it. SIGTERM,
    SIGHUP and Ctrl-C end it with a message that says how much is `kept`, such as ``tokens are
    read``.

    Raises Terminated and Interrupted.
    """
    from moebatch.report.progress import progress_bar

    def handle(number: int, frame: FrameType | None) -> None:
        raise _SignalledEnd(number)

    def comes_again(error: BaseException | None) -> bool:
        if isinstance(error, KeyboardInterrupt):
            number = error.signal if isinstance(error, _SignalledEnd) else signal.SIGINT
            threading.Timer(_SOON_S, signal.raise_signal, (number,)).start()
        return isinstance(error, KeyboardInterrupt)

    def left() -> str:
        continues = f"{kept} and kept: the same command continues after them"
        return f"{work.num_kept} {continues}" if work.num_kept else "nothing is kept yet"

    console = error_console()
    with progress_bar(doing, console, quiet=quiet) as advance, _told_unless(comes_again):
        work = begin(logger(console, quiet=quiet), advance)
        ends = filter(_is_heard, (signal.SIGTERM, signal.SIGHUP))
        before = {number: signal.signal(number, handle) for number in ends}
        try:
            return work.execute()
        except _SignalledEnd as end:
            raise Terminated(f"ended by {end.signal.name}; {left()}") from None
        except KeyboardInterrupt:
            raise Interrupted(f"stopped by Ctrl-C; {left()}") from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def let_threads_sleep() -> None:
    """Before torch is loaded: its threads should sleep, not spin, while they have nothing to do.

    Spinning ones keep readers, the progress display and other processes off the cores,
    which then makes every parallel operation wait for a thread that is not running.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
