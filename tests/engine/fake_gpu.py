"""A GPU of threads: each stream runs what is issued on it, in order, when that may run."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue


class FakeStream:
    """A thread that runs what is issued; after a failure nothing runs any more."""

    def __init__(self, lag: random.Random | None = None) -> None:
        """`lag` makes it late now and then."""
        self.failure: BaseException | None = None
        self._lag = lag
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._loop, daemon=True).start()

    def issue(self, work: Callable[[], object], *, always: bool = False) -> None:
        def run() -> None:
            if always or self.failure is None:
                work()

        self._work.put(run)

    def wait_event(self, event: "FakeEvent") -> None:
        assert event.come is not None, "a stream waits for events that have been recorded"
        self.issue(event.come.wait)

    def synchronize(self) -> None:
        event = FakeEvent()
        event.record(self)
        event.synchronize()

    def _loop(self) -> None:
        while True:
            work = self._work.get()
            if self._lag is not None and self._lag.random() < 0.3:
                time.sleep(self._lag.random() * 5e-4)
            try:
                work()
            except BaseException as error:
                self.failure = error


class FakeEvent:
    """Knows when its stream had come so far."""

    def __init__(self) -> None:
        self.come: threading.Event | None = None
        self.come_s = 0.0
        self.stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self.stream, come = stream, threading.Event()
        self.come = come

        def pass_by() -> None:
            self.come_s = time.perf_counter()
            come.set()

        stream.issue(pass_by, always=True)

    def synchronize(self) -> None:
        assert self.come is not None and self.stream is not None, "it has been recorded"
        self.come.wait()
        if self.stream.failure is not None:
            raise RuntimeError("device-side failure") from self.stream.failure

    def elapsed_time(self, later: "FakeEvent") -> float:
        return (later.come_s - self.come_s) * 1e3


class FakeGpu:
    """What `moebatch.engine.lanes.streams.Gpu` is for a real one."""

    def __init__(self, lag: random.Random | None = None) -> None:
        self._lag = lag
        self._local = threading.local()
        self.num_settled = 0

    @property
    def current(self) -> FakeStream | None:
        """The stream of this thread."""
        return getattr(self._local, "stream", None)

    def stream(self) -> FakeStream:
        return FakeStream(self._lag)

    def event(self, *, blocking: bool) -> FakeEvent:
        return FakeEvent()

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before, self._local.stream = self.current, stream
        try:
            yield
        finally:
            self._local.stream = before

    def settle(self) -> None:
        self.num_settled += 1

    def launch(self, kernel: Callable[[], object]) -> None:
        """Issues a kernel on the stream of this thread."""
        assert self.current is not None, "this thread has a stream"
        self.current.issue(kernel)
