"""Which way keys and values go between where they live and where attention is computed."""

from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

from moebatch.schedule.task import Kind
from moebatch.spec.machine.hardware import LevelName

Place = Literal["vram", "dram"]
"""A level that computes attention."""
TO_ATTENTION = (Kind.KV_READ, Kind.KV_UP)
FROM_ATTENTION = (Kind.KV_DOWN, Kind.KV_WRITE)
"""Transfers before attention, and those behind it, in their order."""


class Hop(NamedTuple):
    """What one task copies: from the pages or the window of one level to those of another."""

    source: LevelName
    target: LevelName


class WindowName(NamedTuple):
    """A pair of windows: for attention at `place`, in the memory of `level`.

    Places share none: their micro-batches are in work at the same time.
    """

    place: Place
    level: LevelName


def route(home: LevelName, place: Place, top: Place) -> Mapping[Kind, Hop]:
    """The tasks of a layer at `home` whose attention is computed at `place`, and what they copy.

    A task is one lane's, so what goes to a GPU comes from disk in two hops. Where there is no
    GPU, the lane of `KV_UP` is the one from disk.
    """
    if home == place:
        return {}
    if home != "disk":
        return {Kind.KV_UP: Hop(home, place), Kind.KV_DOWN: Hop(place, home)}
    if place == "vram":
        return {
            Kind.KV_READ: Hop("disk", "dram"),
            Kind.KV_UP: Hop("dram", "vram"),
            Kind.KV_DOWN: Hop("vram", "dram"),
            Kind.KV_WRITE: Hop("dram", "disk"),
        }
    if top == "vram":
        return {Kind.KV_READ: Hop("disk", "dram"), Kind.KV_WRITE: Hop("dram", "disk")}
    return {Kind.KV_UP: Hop("disk", "dram"), Kind.KV_DOWN: Hop("dram", "disk")}


@cache  # plans ask thousands of times
def windows(
    homes: frozenset[LevelName], places: frozenset[Place], top: Place
) -> frozenset[WindowName]:
    """Windows that layers with these homes need to attend at these places: at each stop of a route
    that is not home."""
    return frozenset(
        WindowName(place, level)
        for place in places
        for home in homes
        for hop in route(home, place, top).values()
        for level in hop
        if level != home
    )
