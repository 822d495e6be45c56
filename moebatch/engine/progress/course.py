"""How a run goes, pass by pass: what an estimate of the time left is made of."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from moebatch.engine.batcher import Batcher, Slice
from moebatch.engine.progress.endings import Endings
from moebatch.engine.progress.time_left import PassDone, Standing
from moebatch.engine.sequence import Sequence as TokenSequence
from moebatch.layout.load import PassLoad
from moebatch.plan.replay.passes import load_of_slices

_MOST_KEPT = 256
"""Passes that no estimate has taken yet."""
_STANDING_EVERY_S = 1.0
"""The standing is looked at so often, however short passes are."""


class Course:
    """Written by the thread that runs passes; another one reads it, and takes passes away."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.passes: deque[PassDone] = deque(maxlen=_MOST_KEPT)
        self.endings = Endings()
        self.standing = Standing()
        self._clock = clock
        self._num_passes = 0
        self._ended_s = clock()
        self._looked_s = float("-inf")

    def begin(self) -> None:
        """The first pass begins now."""
        self._ended_s = self._clock()

    @property
    def since_s(self) -> float:
        """Seconds since the last pass ended."""
        return self._clock() - self._ended_s

    def after_pass(self, slices: Sequence[Slice], batcher: Batcher, *, num_grown: int) -> None:
        """A pass of these slices has ended; so many experts stay now that did not at first."""
        now_s = self._clock()
        self._num_passes += 1
        self.passes.append(
            PassDone(
                number=self._num_passes,
                load=_load(slices),
                seconds=now_s - self._ended_s,
                num_grown=num_grown,
            )
        )
        self._ended_s = now_s
        if now_s - self._looked_s >= _STANDING_EVERY_S:
            self._looked_s = now_s
            self.standing = batcher.standing(self._num_passes)

    def ended(self, sequence: TokenSequence) -> None:
        """An answer has come to its end."""
        self.endings.add(
            len(sequence.output_tokens),
            sequence.request.sampling.max_tokens,
            begun=sequence.num_begun,
        )


def _load(slices: Sequence[Slice]) -> PassLoad:
    """What a pass had to do, once it is computed."""
    encodes = any(piece.sequence.request.num_encoded for piece in slices)
    counted = [
        (piece.num_tokens, piece.sequence.num_cached, piece.was_decoding or _is_answer(piece))
        for piece in slices
    ]
    num_ending = sum(
        not is_answer and piece.sequence.num_pending <= 1
        for piece, (_, _, is_answer) in zip(slices, counted, strict=True)
    )
    return load_of_slices(counted, num_ending=num_ending, encodes=encodes)


def _is_answer(piece: Slice) -> bool:
    """Whether it has been behind the layers that encode already."""
    sequence = piece.sequence
    return sequence.request.num_encoded > 0 and sequence.num_cached > piece.num_tokens
