"""Keys and values on every level, and windows for layers that live elsewhere than they attend."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from moebatch.schedule.steps.kv import NUM_WINDOWS
from moebatch.schedule.steps.kv_route import TO_ATTENTION, Hop, Place, WindowName, route
from moebatch.schedule.task import Kind
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.cache_layout import CacheLayout
from moebatch.store.kv.layout import KvLayout
from moebatch.store.kv.moves import Moves
from moebatch.store.kv.tensors import KvRoom, KvShape, KvTensors
from moebatch.store.kv.view import KvView
from moebatch.store.scratch_file import LayerPages, ScratchFile


@dataclass(frozen=True, slots=True)
class _Stored:
    """A group with the pages that each of its layers has."""

    number: int
    group: CacheGroup
    shape: KvShape
    num_pages: int

    @property
    def on_disk(self) -> LayerPages:
        parts = self.shape.cache.parts
        return LayerPages(self.num_pages, [self.shape.part_bytes(part) for part in parts])


class KvLevels:
    """Room for the pages of every layer at its home, and the windows.

    A micro-batch goes through a window layer by layer, so groups whose rows are alike share one.
    Moves may run in several lanes at once. What must wait for what is the schedule's business: a
    window belongs to one micro-batch from its first hop up to its last one down.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_pages: Sequence[int],
        dtype: torch.dtype,
        layout: KvLayout,
    ) -> None:
        """`num_pages` are those of each group. Raises StorageError when the disk has no room."""
        self.layout = layout
        self._groups = [
            _Stored(
                number,
                group,
                KvShape(cache=group.layout, dtype=dtype, page_rows=group.page_rows),
                count,
            )
            for number, (group, count) in enumerate(zip(groups, num_pages, strict=True))
        ]
        self._of_layer: dict[int, list[_Stored]] = {}
        for one in self._groups:
            for layer in one.group.layers:
                self._of_layer.setdefault(layer, []).append(one)
        self._rooms: list[list[KvRoom]] = [[] for _ in groups]
        self._num_bytes: dict[LevelName, int] = {}
        self.homes: dict[tuple[int, int], KvTensors] = {}
        """By layer and group, without those on disk."""
        self._windows: dict[tuple[WindowName, CacheLayout], list[KvTensors]] = {}
        self._places_on_disk: dict[tuple[int, int], int] = {}
        """Where the scratch file has them, by layer and group."""
        self._opened = ExitStack()
        """Gives back the scratch file, and memory that is pinned."""
        with self._opened:  # where memory is refused, a smaller cache may be tried next
            self._file = self._open_file()  # first: a full disk is said before memory is taken
            for one in self._groups:
                self._open_homes(one)
            for name in sorted(layout.windows):
                self._open_windows(name)
            self._opened = self._opened.pop_all()

    def bytes_on(self, level: LevelName) -> int:
        """Bytes of homes and windows on a level that is memory, without what was given back."""
        return self._num_bytes.get(level, 0)

    def page_bytes(self, group: int) -> int:
        """One page of a group, over all of its layers."""
        return self._groups[group].shape.page_bytes * len(self._groups[group].group.layers)

    @property
    def can_shrink(self) -> bool:
        """Whether memory of pages can be given back: all layers are in main memory, and attend
        there."""
        in_memory = all(home == "dram" for home in self.layout.levels)
        return in_memory and not self._windows and not self.layout.has_cuda

    def copy_pages(self, group: int, moved: Mapping[int, int]) -> None:
        """Copies pages, in all layers of a group, to others that are not among them."""
        for layer in self._groups[group].group.layers:
            for pages_XN in self.homes[layer, group].units(self._groups[group].group.page_rows):
                for source, target in moved.items():
                    pages_XN[target] = pages_XN[source]

    def cut_down(self, num_pages: Sequence[int]) -> int:
        """Cuts homes down to their first pages, so many of each group; returns the bytes that the
        system has back."""
        assert self.can_shrink, "only plain main memory is given back"
        num_bytes = 0
        for one, rooms, count in zip(self._groups, self._rooms, num_pages, strict=True):
            num_bytes += sum(room.give_back(count) for room in rooms)
            for layer in one.group.layers:
                home = self.homes[layer, one.number]
                self.homes[layer, one.number] = home.first(count * one.group.page_rows)
        self._num_bytes["dram"] -= num_bytes
        return num_bytes

    def is_direct(self, place: Place, layer: int) -> bool:
        """Whether the layer lives at `place`: its tokens are at the owner's `rows` there, at those
        of a view's window otherwise."""
        return self.layout.levels[layer] == place

    def tensors(self, place: Place, layer: int, window: int) -> KvTensors:
        """What attention of a layer reads and writes, of all groups that the layer is in."""
        found = (self._at(place, place, layer, one, window) for one in self._of_layer[layer])
        return KvTensors(tuple(part for each in found for part in each.parts))

    def check_fits(self, view: KvView) -> None:
        """Asserts that the view's pages fit into a window, if it needs one."""
        if not any(name.place == view.place for name, _ in self._windows):
            return
        for one, of_group in zip(self._groups, view.groups, strict=True):
            fits = of_group.moves.num_pages <= self._window_pages(one)
            assert fits, "a micro-batch has more pages than a window"

    def num_bytes(self, kind: Kind, view: KvView, layer: int) -> int:
        """Bytes that `kind` moves for the view; 0 where it is not needed."""
        hop = self._hop(kind, view, layer)
        if hop is None:
            return 0
        whole_pages = kind in TO_ATTENTION or hop.target == "disk"
        return sum(
            (one.shape.page_bytes if whole_pages else one.shape.row_bytes)
            * len(self._moves(kind, hop, view, layer, one))
            for one in self._of_layer[layer]
        )

    def move(self, kind: Kind, view: KvView, layer: int) -> None:
        """Does a task of keys and values for the view: its context to where it attends in whole
        pages, or what is new to where it lives, one hop of the way.

        May be called although there is nothing to move, but not for a task that the layer never
        has. Raises StorageError when the disk fails.
        """
        hop = self._hop(kind, view, layer)
        assert hop is not None, f"layer {layer} needs no {kind} to attend at {view.place}"
        for one in self._of_layer[layer]:
            self._move(kind, hop, view, layer, one)

    def _move(self, kind: Kind, hop: Hop, view: KvView, layer: int, one: _Stored) -> None:
        moves = self._moves(kind, hop, view, layer, one)
        if "disk" in hop:
            self._move_disk(hop, moves, view, layer, one)
            return
        source, target = (self._at(level, view.place, layer, one, view.window) for level in hop)
        unit_rows = one.group.page_rows if kind in TO_ATTENTION else 1
        for from_XN, to_XN in zip(source.units(unit_rows), target.units(unit_rows), strict=True):
            moves.copy(from_XN, to_XN)

    def close(self) -> None:
        """Gives the scratch file back and unpins memory. Nothing may be in flight."""
        self._opened.close()

    def _move_disk(self, hop: Hop, moves: Moves, view: KvView, layer: int, one: _Stored) -> None:
        assert self._file is not None, "a layer on disk has a file"
        number, page_rows = self._places_on_disk[layer, one.number], one.group.page_rows
        from_disk = hop.source == "disk"
        level = hop.target if from_disk else hop.source
        window = self._at(level, view.place, layer, one, view.window)
        transfer = self._file.read if from_disk else self._file.write
        parts = [pages_XN.view(torch.uint8) for pages_XN in window.units(page_rows)]
        transfer(number, moves.file_runs(from_file=from_disk), parts)

    def _moves(self, kind: Kind, hop: Hop, view: KvView, layer: int, one: _Stored) -> Moves:
        moves = view.groups[one.number].moves
        staged = self.layout.levels[layer] not in hop
        if kind in TO_ATTENTION:
            return moves.staged_context if staged else moves.context
        if hop.target == "disk":
            return moves.touched
        return moves.staged_new if staged else moves.new

    def _hop(self, kind: Kind, view: KvView, layer: int) -> Hop | None:
        home = self.layout.levels[layer]
        return route(home, view.place, self.layout.top).get(kind)

    def _at(
        self, level: LevelName, place: Place, layer: int, one: _Stored, window: int
    ) -> KvTensors:
        """The layer's home if that is the level, or else a window."""
        if self.layout.levels[layer] == level:
            return self.homes[layer, one.number]
        return self._windows[WindowName(place, level), one.group.layout][window]

    def _window_pages(self, one: _Stored) -> int:
        """Most pages of a group that a micro-batch has."""
        return min(self.layout.window_pages[one.number], one.num_pages)

    def _open_homes(self, one: _Stored) -> None:
        for level in ("dram", "vram"):
            layers = [layer for layer in one.group.layers if self.layout.levels[layer] == level]
            if layers:
                room = self._allocate(level, one, len(layers), one.num_pages)
                self._rooms[one.number].append(room)
                keys = [(layer, one.number) for layer in layers]
                self.homes |= dict(zip(keys, room.tensors, strict=True))

    def _open_windows(self, name: WindowName) -> None:
        """As large as the group needs that needs most of those whose rows are alike."""
        for one in sorted(self._groups, key=self._window_pages, reverse=True):
            key = name, one.group.layout
            if key not in self._windows:
                room = self._allocate(name.level, one, NUM_WINDOWS, self._window_pages(one))
                self._windows[key] = room.tensors

    def _allocate(self, level: LevelName, one: _Stored, count: int, num_pages: int) -> KvRoom:
        assert num_pages > 0, "layers that live elsewhere than they attend need windows"
        device, pinned = self.layout.device(level), level == "dram" and self.layout.has_cuda
        num_bytes = count * num_pages * one.shape.page_bytes
        self._num_bytes[level] = self._num_bytes.get(level, 0) + num_bytes
        room = KvRoom(one.shape, count, num_pages, device, pinned=pinned)
        self._opened.callback(room.close)
        return room

    def _open_file(self) -> ScratchFile | None:
        homes, folder = enumerate(self.layout.levels), self.layout.folder
        layers = (layer for layer, home in homes if home == "disk")
        there = [(layer, one) for layer in layers for one in self._of_layer[layer]]
        self._places_on_disk = {(layer, one.number): n for n, (layer, one) in enumerate(there)}
        if not there:
            return None
        assert folder is not None, "keys and values on disk need a folder"
        file = ScratchFile(folder, [one.on_disk for _, one in there])
        self._opened.callback(file.close)
        return file
