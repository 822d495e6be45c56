"""Finds room for labels on a plot: where they lie on nothing else."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from math import hypot, inf

from moebatch.report.log_axes import Box
from moebatch.report.svg import FONT_SIZE, Point

LINE_HEIGHT = 16.0
_BASE_LINE = 4.0
"""From the lower edge of a line of text up to its base line."""
_STEP = 8.0
_MARGIN = 3.0
"""On either side of a label."""
_HALF = FONT_SIZE / 2


class LabelRoom:
    """The free part of a plot; every label that finds room takes it."""

    def __init__(self, box: Box, *, drawn: Iterable[Point], faint: Iterable[Point] = ()) -> None:
        """Labels stay within `box` and off all points given, which are to be no more than a few
        units apart. One that belongs to a point may lie on faint ones rather than nowhere."""
        self._box = box
        self._drawn = sorted(drawn)
        self._all = sorted([*self._drawn, *faint])
        self._taken: list[Box] = []

    def near(self, point: Point, width: float) -> Point | None:
        """Start of the base line of a label close to a point, None if there is no room."""
        return self._first(_around(point, width)) or self._first(
            _around(point, width), on_faint=True
        )

    def on(self, ends: tuple[Point, Point], width: float) -> Point | None:
        """The same on a level line or, failing that, below it, as far to the right as may be."""
        (left, y), (right, _) = ends
        last = right - 6 - width
        count = max(0, int((last - left) / _STEP) + 1)
        return self._first(
            Box(left=last - _STEP * k, top=top, width=width, height=LINE_HEIGHT)
            for top in (y - LINE_HEIGHT - 4, y + 4)
            for k in range(count)
        )

    def along(self, ends: tuple[Point, Point], width: float) -> Point | None:
        """The same along a rising line, for a label turned as the line is: above it or, failing
        that, below it, as far to the lower left as may be."""
        (x, y), (to_x, to_y) = ends
        length = hypot(to_x - x, to_y - y)
        across, down = (to_x - x) / length, (to_y - y) / length
        count = max(0, int((length - width - 18) / _STEP) + 1)
        for off in (_HALF, -_HALF - FONT_SIZE * 0.75):
            middle = off + FONT_SIZE * 0.36  # of the letters, away from the line
            for at in (12 + _STEP * k for k in range(count)):
                letters = [
                    (x + across * s + down * middle, y + down * s - across * middle)
                    for s in (at + 5 * k for k in range(int(width / 5) + 1))
                ]
                if self._take([_square(letter) for letter in letters]):
                    return x + across * at + down * off, y + down * at - across * off
        return None

    def _first(self, candidates: Iterable[Box], *, on_faint: bool = False) -> Point | None:
        for box in candidates:
            if self._take((box.wider(_MARGIN),), on_faint=on_faint):
                return box.left, box.bottom - _BASE_LINE
        return None

    def _take(self, boxes: Sequence[Box], *, on_faint: bool = False) -> bool:
        free = all(self._is_free(box, on_faint) for box in boxes)
        if free:
            self._taken += boxes
        return free

    def _is_free(self, box: Box, on_faint: bool) -> bool:
        if not all(map(self._box.holds, box.corners)) or any(map(box.meets, self._taken)):
            return False
        points = self._drawn if on_faint else self._all
        from_left = bisect_left(points, (box.left, 0.0))
        until_right = bisect_left(points, (box.right, inf))
        return not any(map(box.holds, points[from_left:until_right]))


def _square(middle: Point) -> Box:
    return Box(left=middle[0] - _HALF, top=middle[1] - _HALF, width=2 * _HALF, height=2 * _HALF)


def _around(point: Point, width: float) -> Iterator[Box]:
    x, y = point
    for gap in (9, 16, 26, 38):
        left, middle, right = x - gap - width, x - width / 2, x + gap
        above, level, below = y - gap - LINE_HEIGHT, y - LINE_HEIGHT / 2, y + gap
        corners = (
            (right, below),
            (left, above),
            (right, above),
            (left, below),
            (middle, below),
            (middle, above),
            (right, level),
            (left, level),
        )
        for corner_x, corner_y in corners:
            yield Box(left=corner_x, top=corner_y, width=width, height=LINE_HEIGHT)
