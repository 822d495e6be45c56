"""Keeps in check what comes with a model: libraries that break down over its files, templates that
never end, and what either would print."""

import ctypes
import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from moebatch.errors import CheckpointError, StorageError
from moebatch.quoting import reason

_LOOKS_PER_LIMIT = 10
_DISK_FAILS = f"(os error {errno.EIO})"
"""How what is written in Rust ends that says so: it raises no OSError."""


class TooLong(Exception):
    """What was limited has not ended in time."""


class _TakenBack(Exception):
    """Comes in place of a TooLong whose block has ended."""


class TimeLimit:
    """Blocks of Python code that may take so many seconds each; entering one costs next to nothing.

    A thread of its own watches them: signals would reach the main thread only.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        self._begun: dict[int, float] = {}
        """When each thread has entered its block; one in which TooLong was raised is out of it."""
        self._watcher: threading.Thread | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises TooLong in the block, as soon as it next computes anything in Python."""
        thread = threading.get_ident()
        with self._lock:
            self._begun[thread] = time.monotonic()
            self._watch()
        try:
            yield
        finally:
            self._leave(thread)

    def _leave(self, thread: int) -> None:
        with self._lock:
            is_late = self._begun.pop(thread, None) is None
        if is_late:
            _take_back(thread)  # it may have ended before that

    def _watch(self) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._look, name="time limit", daemon=True)
            self._watcher.start()

    def _look(self) -> None:
        while True:
            time.sleep(self.seconds / _LOOKS_PER_LIMIT)
            with self._lock:
                if not self._begun:
                    self._watcher = None
                    return
                now = time.monotonic()
                late = [t for t, begun in self._begun.items() if now - begun > self.seconds]
                for thread in late:
                    del self._begun[thread]
                    _raise_in(thread, TooLong)


def _raise_in(thread: int, error: type[Exception]) -> None:
    """Makes a thread raise at its next instruction, and nothing that it was to raise before."""
    what = ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


def _take_back(thread: int) -> None:
    """What this thread was to raise does not come any more.

    Python has a call for that as well, but it leaves a flag of the interpreter set (3.11): from
    then on every thread looks for what is not there, and none that is traced ever goes on.
    """
    with suppress(_TakenBack):
        _raise_in(thread, _TakenBack)
        while True:
            time.sleep(0)


@contextmanager
def blamed(folder: Path, fault: str) -> Iterator[None]:
    """Whatever the libraries raise over damaged files is a CheckpointError, but StorageError where
    the disk fails. Panics of those that are written in Rust are no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        message = f"{folder}: the tokenizer {fault}: {reason(error)}"
        is_of_disk = getattr(error, "errno", None) == errno.EIO or _DISK_FAILS in str(error)
        raise (StorageError if is_of_disk else CheckpointError)(message) from error


@contextmanager
def silence() -> Iterator[None]:
    """Keeps off the screen what libraries write there themselves: backtraces of panics, and words
    of files as they are. Other threads are not heard meanwhile either."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream is not None]
    with ExitStack() as ends:
        for stream in streams:
            stream.flush()
        for descriptor in (1, 2):
            with suppress(OSError):  # there may be none
                screen = os.dup(descriptor)
                ends.callback(os.close, screen)
                ends.callback(os.dup2, screen, descriptor)
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
        for stream in streams:
            ends.callback(stream.flush)
        yield
