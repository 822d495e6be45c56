"""Signals that ask a run to stop."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from moebatch.errors import ExitCode, Interrupted, Terminated

if TYPE_CHECKING:
    from moebatch.job.stop import Stop

_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


@contextmanager
def stopping_on_signals(stop: "Stop") -> Iterator[None]:
    """While the block runs, the first signal asks for a stop, and a second one ends the process at
    once: what was finished by then is kept all the same."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.reason is not None:
            os._exit(ExitCode.INTERRUPTED)
        stop.ask(signal.Signals(number).name)

    numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hear_interrupts() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt, so that a command can clear up behind itself."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class SignalledEnd(KeyboardInterrupt):
    """SIGTERM, raised where Ctrl-C would be."""


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """While the block runs, SIGTERM breaks it off as Ctrl-C does."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise SignalledEnd

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def saying_what_is_kept(kept: Callable[[], str]) -> Iterator[None]:
    """While the block runs, SIGTERM and Ctrl-C end it with a message that says what `kept` says.

    Raises Terminated and Interrupted.
    """
    try:
        with ending_on_sigterm():
            yield
    except SignalledEnd:
        raise Terminated(f"ended by SIGTERM; {kept()}") from None
    except KeyboardInterrupt:
        raise Interrupted(f"stopped by Ctrl-C; {kept()}") from None
