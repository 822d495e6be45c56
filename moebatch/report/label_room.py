"""Finds room for labels on a plot: where they lie on nothing else.

Places are in pixels from the lower left corner of a picture.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import atan2, cos, degrees, hypot, radians, sin

import numpy as np
from numpy.typing import NDArray

Points_N2 = NDArray[np.float64]
_DESCENT, _ASCENT = 4.0, 12.0
"""Of a line of text below and above its base line."""
_MARGIN = 3.0
"""On either side of a label."""
_STEP = 8.0
_OFF_LINE = 6.0
"""From a line up to the base line of a label on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the base line of a label begins, and degrees counterclockwise by which it rises."""

    x: float
    y: float
    angle: float = 0.0


class LabelRoom:
    """The free part of a plot; every label that finds room takes it."""

    def __init__(self, corners_22: Points_N2, drawn_N2: Points_N2, faint_N2: Points_N2) -> None:
        """Labels stay between the lower left and the upper right corner and off all points, which
        are at most a few pixels apart. A label may lie on faint points rather than nowhere."""
        self._corners_22 = corners_22
        self._drawn_N2 = drawn_N2
        self._faint_N2 = faint_N2

    def take(self, places: Iterable[Place], width: float) -> Place | None:
        """The first of these places that is free for a label of that width, if there is one."""
        places = list(places)
        for points_N2 in (np.concatenate([self._drawn_N2, self._faint_N2]), self._drawn_N2):
            for place in places:
                if self._is_free(place, width, points_N2):
                    taken_N2 = _to_picture(place, _grid(width))
                    self._drawn_N2 = np.concatenate([self._drawn_N2, taken_N2])
                    return place
        return None

    def _is_free(self, place: Place, width: float, points_N2: Points_N2) -> bool:
        ends_42 = np.array([(x, y) for x in (0.0, width) for y in (-_DESCENT, _ASCENT)])
        ends_42 = _to_picture(place, ends_42)
        low, high = self._corners_22
        if not ((ends_42 >= low) & (ends_42 <= high)).all():
            return False
        across_N, up_N = _to_label(place, points_N2).T
        is_covered_N = (across_N >= -_MARGIN) & (across_N <= width + _MARGIN)
        return not (is_covered_N & (up_N >= -_DESCENT) & (up_N <= _ASCENT)).any()


def around(x: float, y: float, width: float) -> Iterator[Place]:
    """Places of a label close to a point, the best first."""
    height = _DESCENT + _ASCENT
    for gap in (9, 16, 26, 38):
        left, middle, right = x - gap - width, x - width / 2, x + gap
        above, level, below = y + gap, y - height / 2, y - gap - height
        corners = (
            *((right, below), (left, above), (right, above), (left, below)),
            *((middle, below), (middle, above), (right, level), (left, level)),
        )
        for corner_x, corner_y in corners:
            yield Place(x=corner_x, y=corner_y + _DESCENT)


def along(ends_22: Points_N2, width: float, *, from_end: bool = False) -> Iterator[Place]:
    """Places along a line, for a label turned as the line is: above it or, failing that, below
    it, as far to its start as possible, or to its end."""
    (x, y), (to_x, to_y) = ends_22
    length, angle = hypot(to_x - x, to_y - y), atan2(to_y - y, to_x - x)
    shifts = np.arange(_STEP, length - width - _STEP, _STEP)
    for off in (_OFF_LINE, -_OFF_LINE - _ASCENT + _DESCENT):
        for shift in shifts[::-1] if from_end else shifts:
            yield Place(
                x=x + cos(angle) * shift - sin(angle) * off,
                y=y + sin(angle) * shift + cos(angle) * off,
                angle=degrees(angle),
            )


def dotted(line_N2: Points_N2, distance: float = 4.0) -> Points_N2:
    """Points along a line through given points, a few pixels apart."""
    pieces = [np.empty((0, 2))]
    for start_2, end_2 in pairwise(line_N2):
        count = max(2, int(np.hypot(*(end_2 - start_2)) / distance) + 2)
        pieces.append(np.linspace(start_2, end_2, count))
    return np.concatenate(pieces)


def _grid(width: float) -> Points_N2:
    across = np.linspace(0, width, max(2, int(width / _DESCENT) + 2))
    return np.array([(x, y) for x in across for y in (-_DESCENT, 0, _DESCENT, _ASCENT)])


def _turn(angle: float) -> NDArray[np.float64]:
    turn = radians(angle)
    return np.array([[cos(turn), -sin(turn)], [sin(turn), cos(turn)]])


def _to_picture(place: Place, points_N2: Points_N2) -> Points_N2:
    turned_N2: Points_N2 = points_N2 @ _turn(place.angle).T + (place.x, place.y)
    return turned_N2


def _to_label(place: Place, points_N2: Points_N2) -> Points_N2:
    turned_N2: Points_N2 = (points_N2 - (place.x, place.y)) @ _turn(place.angle)
    return turned_N2
