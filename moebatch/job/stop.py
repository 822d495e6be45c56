"""Whether a run has been asked to stop, by a signal or by the clock; whether it stands still."""

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from moebatch.errors import Stopped
from moebatch.periodic import periodically
from moebatch.units import format_duration


class StopNow(KeyboardInterrupt):
    """A signal, wherever the program was: a library that is being imported, or tries something,
    holds back exceptions, but not these."""


class Stop:
    """Asked from any thread, and from handlers of signals."""

    def __init__(self, *, max_runtime_s: float | None = None) -> None:
        """The clock starts now."""
        self._reason: str | None = None
        self._asked = threading.Event()
        self._is_deferred = False
        self._is_over = False
        self._broke_off = False
        self._is_late = False
        self._gained: str | None = None
        self._runtime_s = max_runtime_s
        self._deadline = None if max_runtime_s is None else time.monotonic() + max_runtime_s

    @property
    def reason(self) -> str | None:
        """Why, in words; None as long as the run may go on."""
        return self._reason

    @property
    def is_out_of_time(self) -> bool:
        """Whether it was the clock, or the signal by which Slurm says that time is nearly over."""
        return self._is_late or self._reason == "SIGUSR1"

    @property
    def has_gained(self) -> bool:
        """Whether there is anything now that earlier runs had not."""
        return self._gained is not None

    def gained(self, what: str) -> None:
        """From now on a stop at once says `what` there is, not that there is nothing."""
        self._gained = what

    def over(self) -> None:
        """From now on there is nothing to stop: all that is asked for is there."""
        self._is_over = True

    def ask(self, reason: str) -> None:
        """Has the run stop: at once by raising StopNow, or where it has more to do before, soon;
        not at all once it is over, or when it stops already because its time is.

        Called in the main thread, by the handler of a signal.
        """
        if not self._is_late:
            self._ask(reason)

    @property
    def left_s(self) -> float | None:
        """Seconds after which the clock asks for a stop; None if it never does."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def ask_in_time(self, *, at_once: bool = False) -> None:
        """Does what `ask` does because no time is left, also in the main thread; or once more what
        was asked for before. What defers a stop looks at the clock itself.

        Args:
            at_once: nothing that defers a stop may come to an end soon, and nothing is half done
                where the main thread is.
        """
        if at_once or (self._reason is None and not self._is_deferred):
            self._is_late = self._reason in (None, self._late)
            self._ask(self._late, at_once=at_once)

    @property
    def _late(self) -> str:
        return f"the run has had its {format_duration(self._runtime_s or 0.0)}"

    def _ask(self, reason: str, *, at_once: bool = False) -> None:
        self._reason = self._reason or reason
        self._asked.set()
        if (at_once or not self._is_deferred) and not self._is_over:
            self._break_off()

    def obey(self) -> None:
        """Raises StopNow if a stop was asked for and the run goes on all the same: what is raised
        while an object is finalised gets no further."""
        if self._asked.is_set():
            self._break_off()

    def _break_off(self) -> NoReturn:
        self._broke_off = True
        raise StopNow(self._said_at_once)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """While the block runs, a stop at once becomes `Stopped` for the code around it."""
        try:
            yield
        except Stopped:
            raise
        except StopNow:
            raise self._stopped() from None
        except Exception:
            # What is written in C may make another error of it, in the middle of an import.
            if not self._broke_off:
                raise
            raise self._stopped() from None

    def _stopped(self) -> Stopped:
        return Stopped(self._said_at_once, has_gained=self.has_gained)

    @property
    def _said_at_once(self) -> str:
        if self._gained is None:
            return f"{self._reason}; nothing was computed yet"
        return f"stopped early ({self._reason}): {self._gained}; run the job again to go on"

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """While the block runs, nothing is raised where it is; at its end StopNow, if a stop was
        asked for. For what cannot be broken off at all."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self.left_s == 0:
            self.ask_in_time()
        self.obey()

    @contextmanager
    def deferred(self, interrupt: Callable[[BaseException], None]) -> Iterator[None]:
        """While the block runs, `interrupt` is called when a stop is asked for, from a thread of
        its own; it has the block raise what it is given, as a stop at once does too."""
        over = threading.Event()
        watcher = threading.Thread(
            target=self._watch, args=(interrupt, over), name="stop", daemon=True
        )
        self._is_deferred = True
        watcher.start()
        try:
            yield
        except StopNow:
            raise Stopped(self._reason or "") from None
        finally:
            over.set()
            self._asked.set()
            watcher.join()
            if self._reason is None:
                self._asked.clear()
            self._is_deferred = False

    def _watch(self, interrupt: Callable[[BaseException], None], over: threading.Event) -> None:
        left_s = self.left_s
        self._asked.wait(None if left_s is None else min(left_s, threading.TIMEOUT_MAX))
        if over.is_set():
            return
        if self._reason is None and self._runtime_s is not None:
            self._is_late = True
            self._reason = self._late
        interrupt(Stopped(self._reason or ""))


PATIENCE_S = 60.0


@contextmanager
def watched(
    moved: Callable[[], Hashable],
    doing: Callable[[], str],
    log: Callable[[str], None],
    *,
    patience_s: float = PATIENCE_S,
) -> Iterator[None]:
    """While the block runs, `log` gets what it is `doing` whenever what has `moved` has been the
    same for so long; once each time."""
    last, since, is_logged = moved(), time.monotonic(), False

    def watch() -> None:
        nonlocal last, since, is_logged
        now, stood_s = moved(), time.monotonic() - since
        if now != last:
            last, since, is_logged = now, time.monotonic(), False
        elif not is_logged and stood_s >= patience_s:
            log(f"warning: nothing has moved for {format_duration(stood_s)}: {doing()}")
            is_logged = True

    with periodically(watch, patience_s / 12, thread="watchdog"):
        yield
