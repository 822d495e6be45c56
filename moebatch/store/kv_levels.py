"""Keys and values on every level, and windows for layers that live elsewhere than they attend."""

from collections.abc import Mapping

from moebatch.schedule.kv import NUM_WINDOWS
from moebatch.schedule.kv_route import Hop, Place, WindowName, route
from moebatch.schedule.task import Kind
from moebatch.spec.hardware import LevelName
from moebatch.spec.policy import PAGE_TOKENS
from moebatch.store.kv_disk import KvFile
from moebatch.store.kv_layout import KvLayout
from moebatch.store.kv_moves import Moves
from moebatch.store.kv_tensors import KvRoom, KvShape, KvTensors
from moebatch.store.kv_view import KvView

KV_TASKS = (Kind.KV_READ, Kind.KV_UP, Kind.KV_DOWN, Kind.KV_WRITE)
_TO_ATTENTION = (Kind.KV_READ, Kind.KV_UP)


class KvLevels:
    """Room for `num_pages` pages of every layer at its home, and the windows.

    Moves may run in several lanes at once. What must wait for what is the schedule's business: a
    window belongs to one micro-batch from its first hop up to its last one down.
    """

    def __init__(self, shape: KvShape, layout: KvLayout, num_pages: int) -> None:
        """Raises StorageError when the disk has no room."""
        self.layout = layout
        self._shape = shape
        self._num_pages = num_pages
        self._rooms: list[KvRoom] = []
        self._file = self._open_file()  # first: a full disk is said before memory is taken
        self._num_bytes_back = 0
        self.homes: dict[int, KvTensors] = {}
        """By layer, without those on disk."""
        for level in ("dram", "vram"):
            layers = [layer for layer, home in enumerate(layout.levels) if home == level]
            if layers:
                room = self._allocate(level, len(layers), num_pages)
                self.homes |= dict(zip(layers, room, strict=True))
        self.window_pages = min(layout.window_pages, num_pages)
        self._windows: dict[WindowName, list[KvTensors]] = {}
        for name in sorted(layout.windows):
            assert self.window_pages > 0, "layers that live elsewhere than they attend need windows"
            self._windows[name] = self._allocate(name.level, NUM_WINDOWS, self.window_pages)

    def bytes_on(self, level: LevelName) -> int:
        """Bytes of homes and windows on a level that is memory."""
        homes = self.layout.levels.count(level) * self._num_pages
        pairs = sum(name.level == level for name in self._windows)
        windows = pairs * NUM_WINDOWS * self.window_pages
        given_back = self._num_bytes_back if level == "dram" else 0
        return (homes + windows) * self._shape.page_bytes - given_back

    @property
    def page_bytes(self) -> int:
        """One page, over all layers."""
        return self._shape.page_bytes * len(self.layout.levels)

    @property
    def can_shrink(self) -> bool:
        """Whether everything is in plain main memory, where attention is."""
        in_memory = all(home == "dram" for home in self.layout.levels)
        return in_memory and not self._windows and not self.layout.has_cuda

    def copy_pages(self, moved: Mapping[int, int]) -> None:
        """Copies pages, in all layers, to others that are not among them."""
        for home in self.homes.values():
            for pages_XN in home.units(PAGE_TOKENS):
                for source, target in moved.items():
                    pages_XN[target] = pages_XN[source]

    def give_back(self, num_pages: int) -> int:
        """Cuts homes down to their first pages; returns the bytes that the system has back."""
        assert self.can_shrink, "only plain main memory is given back"
        num_bytes = sum(room.give_back(num_pages) for room in self._rooms)
        self.homes = {layer: home.first(num_pages) for layer, home in self.homes.items()}
        self._num_bytes_back += num_bytes
        return num_bytes

    def is_direct(self, place: Place, layer: int) -> bool:
        """Whether attention at `place` works on the layer's home itself."""
        return self.layout.levels[layer] == place

    def tensors(self, place: Place, layer: int, window: int) -> KvTensors:
        """What attention of a layer reads and writes."""
        return self._at(place, place, layer, window)

    def check_fits(self, view: KvView) -> None:
        """Asserts that the view's pages fit into a window, if it needs one."""
        has_window = any(name.place == view.place for name in self._windows)
        fits = view.moves.num_pages <= self.window_pages
        assert fits or not has_window, "a micro-batch has more pages than a window"

    def needs(self, view: KvView, layer: int) -> frozenset[Kind]:
        """Tasks that have something to move for the view."""
        return frozenset(kind for kind in KV_TASKS if self.num_bytes(kind, view, layer))

    def num_bytes(self, kind: Kind, view: KvView, layer: int) -> int:
        """Bytes that a task moves; 0 where there is nothing to do."""
        hop = self._hop(kind, view, layer)
        if hop is None:
            return 0
        whole_pages = kind in _TO_ATTENTION or hop.target == "disk"
        unit_bytes = self._shape.page_bytes if whole_pages else self._shape.row_bytes
        return unit_bytes * len(self._moves(kind, hop, view, layer))

    def move(self, kind: Kind, view: KvView, layer: int) -> None:
        """Does a task for the view.

        Raises StorageError when the disk fails.
        """
        hop = self._hop(kind, view, layer)
        assert hop is not None, f"layer {layer} needs no {kind} to attend at {view.place}"
        moves = self._moves(kind, hop, view, layer)
        if "disk" in hop:
            self._move_disk(hop, moves, view, layer)
            return
        source, target = (self._at(level, view.place, layer, view.window) for level in hop)
        unit_rows = PAGE_TOKENS if kind in _TO_ATTENTION else 1
        for from_XN, to_XN in zip(source.units(unit_rows), target.units(unit_rows), strict=True):
            moves.copy(from_XN, to_XN)

    def close(self) -> None:
        """Gives the scratch file back and unpins memory."""
        if self._file is not None:
            self._file.close()
        for room in self._rooms:
            room.close()

    def _move_disk(self, hop: Hop, moves: Moves, view: KvView, layer: int) -> None:
        assert self._file is not None, "a layer on disk has a file"
        number = self.layout.disk_layers.index(layer)
        for run in moves.runs:
            if hop.source == "disk":
                window = self._at(hop.target, view.place, layer, view.window)
                self._file.read(number, run.source, list(window.buffers(run.target, run.length)))
            else:
                window = self._at(hop.source, view.place, layer, view.window)
                self._file.write(number, run.target, list(window.buffers(run.source, run.length)))

    def _moves(self, kind: Kind, hop: Hop, view: KvView, layer: int) -> Moves:
        staged = self.layout.levels[layer] not in hop
        if kind in _TO_ATTENTION:
            return view.moves.staged_context if staged else view.moves.context
        if hop.target == "disk":
            return view.moves.touched
        return view.moves.staged_new if staged else view.moves.new

    def _hop(self, kind: Kind, view: KvView, layer: int) -> Hop | None:
        home = self.layout.levels[layer]
        return route(home, view.place, self.layout.top).get(kind)

    def _at(self, level: LevelName, place: Place, layer: int, window: int) -> KvTensors:
        """The layer's home if that is the level, or else a window."""
        if self.layout.levels[layer] == level:
            return self.homes[layer]
        return self._windows[WindowName(place, level)][window]

    def _allocate(self, level: LevelName, count: int, num_pages: int) -> list[KvTensors]:
        device, pinned = self.layout.device(level), level == "dram" and self.layout.has_cuda
        self._rooms.append(KvRoom(self._shape, count, num_pages, device, pinned=pinned))
        return self._rooms[-1].tensors

    def _open_file(self) -> KvFile | None:
        layers, folder = self.layout.disk_layers, self.layout.folder
        if not layers:
            return None
        assert folder is not None, "keys and values on disk need a folder"
        return KvFile(
            folder,
            num_layers=len(layers),
            num_pages=self._num_pages,
            part_bytes=[self._shape.part_bytes(part) for part in self._shape.cache.parts],
        )
