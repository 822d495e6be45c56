"""Streams and events of a GPU, and the time of what ran on them."""

import threading
import time
from contextlib import AbstractContextManager
from typing import Any

import torch

_ANCHOR_S = 1.0
"""Clocks of GPU and host drift apart by microseconds in this time, and the float32 milliseconds in
which a GPU gives its times are still exact to less than one."""
_ANCHOR_TRIES = 5


Event = Any
"""A place in a stream: of torch, or of a test's GPU."""
Stream = Any
"""Work for a GPU in the order in which it is issued, of either."""


class Gpu:
    """The GPU that torch uses, as far as lanes need it. Tests have one of their own."""

    def __init__(self) -> None:
        use_attention_of_torch()

    def stream(self) -> Stream:
        """A new stream, independent of all others, the default stream included."""
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def event(self, *, blocking: bool) -> Event:
        """A new event with its time; a wait for it sleeps if `blocking`, or else spins."""
        return torch.cuda.Event(enable_timing=True, blocking=blocking)  # type: ignore[no-untyped-call]

    def use(self, stream: Stream) -> AbstractContextManager[Any]:
        """Has this thread issue and allocate on a stream."""
        return torch.cuda.stream(stream)

    def settle(self) -> None:
        """Waits for everything that has been issued so far on any stream. Not for a job at work."""
        torch.cuda.synchronize()


def use_attention_of_torch() -> None:
    """Keeps attention from cuDNN, which plans anew for every shape, and passes have new shapes for
    ever: 23 to 37 ms of the host each, as is reported, in a cache without bounds."""
    torch.backends.cuda.enable_cudnn_sdp(False)


class StreamClock:
    """Says when events came to pass, in seconds of ``perf_counter``. For several threads."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        # Of its own, so that nothing stands before an anchor.
        self._stream = gpu.stream()
        self._lock = threading.Lock()
        self._anchor()

    def seconds(self, *events: Event) -> list[float]:
        """When each of them came to pass; all of them have."""
        with self._lock:
            if time.perf_counter() - self._base_s > _ANCHOR_S:
                self._anchor()
            return [self._base_s + self._base.elapsed_time(event) / 1e3 for event in events]

    def _anchor(self) -> None:
        """One moment by both clocks: that of the try which took the host least."""
        spans: list[tuple[float, float, Event]] = []
        for _ in range(_ANCHOR_TRIES):
            event = self._gpu.event(blocking=False)
            start_s = time.perf_counter()
            event.record(self._stream)
            event.synchronize()
            end_s = time.perf_counter()
            spans.append((end_s - start_s, (start_s + end_s) / 2, event))
        _, self._base_s, self._base = min(spans, key=lambda span: span[0])
