"""What a command asks of its process: to stop on signals, and threads that sleep."""

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
def saying_what_is_kept(kept: Callable[[], str]) -> Iterator[None]:
    """While the block runs, SIGTERM and Ctrl-C end it with a message that says what `kept` says.

    Raises Terminated and Interrupted.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        raise SignalledEnd

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except SignalledEnd:
        raise Terminated(f"ended by SIGTERM; {kept()}") from None
    except KeyboardInterrupt:
        raise Interrupted(f"stopped by Ctrl-C; {kept()}") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def let_threads_sleep() -> None:
    """Before torch is loaded: its threads should sleep, not spin, while they have nothing to do.

    Spinning ones keep readers, the progress display and other processes off the cores,
    which then makes every parallel operation wait for a thread that is not running.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
