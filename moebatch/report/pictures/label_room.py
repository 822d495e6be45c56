"""Finds room for labels on a plot: where they lie on nothing else.

Points are complex numbers: pixels from the lower left corner of a picture, to the right and up.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Points_N = NDArray[np.complex128]
Place = tuple[complex, complex]
"""Where the base line of a label begins, and its direction as a number of length 1."""
_DESCENT, _ASCENT = 4.0, 12.0
"""Of a line of text below and above its base line."""
_HEIGHT = _DESCENT + _ASCENT
_MARGIN = 3.0
"""On either side of a label."""
_STEP = 8.0
_OFF_LINE = 6.0
"""From a line up to the base line of a label on it."""
_GAPS = (9, 16, 26, 38)
"""Between a point and its label."""


class LabelRoom:
    """The free part of a plot; every label that finds room takes it."""

    def __init__(self, low: complex, high: complex, drawn_N: Points_N, faint_N: Points_N) -> None:
        """Labels stay between two corners and off all points, which are at most a few pixels
        apart. A label may lie on faint points rather than nowhere."""
        self._low, self._high = low, high
        self._drawn_N, self._faint_N = drawn_N, faint_N

    def take(self, places: Iterable[Place], width: float) -> Place | None:
        """The first of these places that is free for a label of that width, if there is one."""
        places = list(places)
        for points_N in (np.concatenate([self._drawn_N, self._faint_N]), self._drawn_N):
            for at, direction in places:
                if self._is_free(at, direction, width, points_N):
                    taken_N = at + direction * _grid(width)
                    self._drawn_N = np.concatenate([self._drawn_N, taken_N])
                    return at, direction
        return None

    def _is_free(self, at: complex, direction: complex, width: float, points_N: Points_N) -> bool:
        label_N = at + direction * _grid(width)
        left, right, bottom, top = self._low.real, self._high.real, self._low.imag, self._high.imag
        if label_N.real.min() < left or label_N.real.max() > right:
            return False
        if label_N.imag.min() < bottom or label_N.imag.max() > top:
            return False
        from_start_N = (points_N - at) / direction
        across_N, up_N = from_start_N.real, from_start_N.imag
        is_covered_N = (across_N >= -_MARGIN) & (across_N <= width + _MARGIN)
        return not (is_covered_N & (up_N >= -_DESCENT) & (up_N <= _ASCENT)).any()


def around(point: complex, width: float) -> Iterator[Place]:
    """Places of a label close to a point, the best first."""
    for gap in _GAPS:
        left, middle, right = -gap - width, -width / 2, float(gap)
        above, level, below = gap + _DESCENT, _DESCENT - _HEIGHT / 2, -gap - _ASCENT
        corners = ((right, below), (left, above), (right, above), (left, below))
        sides = ((middle, below), (middle, above), (right, level), (left, level))
        for across, up in (*corners, *sides):
            yield point + complex(across, up), 1


def along(line_2: Points_N, width: float, *, from_end: bool) -> Iterator[Place]:
    """Places along a line, for a label turned as the line is: above it or, failing that, below
    it, as close to its start as possible, or to its end."""
    start, end = line_2
    length = abs(end - start)
    direction = (end - start) / length
    shifts = np.arange(_STEP, length - width - _STEP, _STEP)
    for off in (_OFF_LINE, -_OFF_LINE - _ASCENT + _DESCENT):
        for shift in shifts[::-1] if from_end else shifts:
            yield start + direction * complex(shift, off), direction


def dotted(line_N: Points_N, distance: float = 4.0) -> Points_N:
    """Points along a line through given points, a few pixels apart."""
    pieces = [line_N]
    for start, end in pairwise(line_N):
        pieces.append(np.linspace(start, end, int(abs(end - start) / distance) + 2))
    return np.concatenate(pieces)


def _grid(width: float) -> Points_N:
    """Points of a label, from the start of its base line."""
    across = np.linspace(0, width, int(width / _DESCENT) + 2)
    return np.concatenate([across + 1j * up for up in (-_DESCENT, 0, _DESCENT, _ASCENT)])
