"""A model folder read in place: which file, offset and length every tensor has."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path

from moebatch.checkpoint.direct import changed
from moebatch.checkpoint.header import MAX_HEADER_BYTES, Extent, read_header
from moebatch.errors import CheckpointError, StorageError, model_file_error
from moebatch.formats.plain import PlainFormat
from moebatch.formats.registry import FORMATS, find_format
from moebatch.formats.weight_format import StoredPart, WeightFormat, share
from moebatch.journal.files import Stamp, stamp_of
from moebatch.quoting import reason, shown
from moebatch.spec.files.json_file import read_object, readable

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_FAULTS = 8


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of a checkpoint, in the tensors in which its format keeps it."""

    name: str
    format: WeightFormat
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    is_turned: bool = False
    """Its rows are computed with as columns."""

    @property
    def step(self) -> int:
        """Fewest rows that can be read by themselves, and their multiples; all of them where its
        format keeps rows together."""
        heights = self.format.heights(self.shape)
        return lcm(*filter(None, heights)) if heights else self.shape[0]

    def rows(self, taken: range) -> "Weight":
        """Some of its rows, from a multiple of `step` on."""
        if len(taken) == self.shape[0]:
            return self
        return self._cut(taken, self.format.heights(self.shape), (len(taken), *self.shape[1:]))

    def sampled(self, count: int) -> Iterator["Weight"]:
        """As many of its rows at the beginning, and from about the middle on; columns where its
        format keeps those apart; all of it where it keeps neither apart, or has no more."""
        axis = 0 if self.format.heights(self.shape) else 1
        lines = self.format.heights(self.shape) or self.format.widths(self.shape)
        size, step = self.shape[axis], lcm(*filter(None, lines))
        if not lines or size <= 2 * count:
            yield self
            return
        for start in sorted({0, size // 2 // step * step}):
            taken = range(start, start + count)
            shape = (count, self.shape[1]) if axis == 0 else (self.shape[0], count)
            yield self._cut(taken, lines, shape)

    def _cut(self, taken: range, lines: tuple[int, ...], shape: tuple[int, ...]) -> "Weight":
        """That of some rows or columns, of which each row of a part holds so many."""
        extents = (
            extent.rows(share(taken, each)) if each else extent
            for extent, each in zip(self.extents, lines, strict=True)
        )
        return replace(self, shape=shape, extents=tuple(extents))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """All tensors of a model folder. Opening reads and validates headers, never weights."""

    folder: Path
    tensors: Mapping[str, Extent]
    files: Mapping[str, Path]
    """Those that hold them, by their names in the folder, links resolved."""
    formats: Mapping[str, WeightFormat] = field(default_factory=dict)
    """Of weights whose files name it; others show it by their tensors."""
    is_gguf: bool = False
    """Files say by themselves what ``config.json`` says elsewhere."""
    stamps: Mapping[Path, Stamp] = field(default_factory=dict)
    """What `stamps_of` said of the files before their headers were read."""

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads the header of the single file or, without one, the index and the header of each
        file that it names: in this order transformers looks for them, so an index that an earlier
        version has left beside a single file counts for nothing.

        Raises CheckpointError for a missing or damaged file, a file name in the index that leads
        outside the folder, and checkpoints that only exist as pickles.
        """
        require_model_folder(folder)
        if (folder / SINGLE_NAME).is_file():
            files = {SINGLE_NAME: file_inside(folder, SINGLE_NAME)}
            stamps, tensors = stamps_of(files), read_header(files[SINGLE_NAME])
        elif (folder / INDEX_NAME).exists():
            weight_map = _weight_map(folder)
            files = {name: file_inside(folder, name) for name in sorted(set(weight_map.values()))}
            stamps, tensors = stamps_of(files), _indexed_tensors(folder, weight_map, files)
        else:
            raise CheckpointError(_nothing_to_read(folder))
        return cls(folder=folder, tensors=tensors, files=files, stamps=stamps)

    def extent(self, name: str, index: int | None = None, num_slices: int | None = None) -> Extent:
        """Where tensor `name` lies, or its slice `index` along the first dimension, perhaps of as
        many that share its rows."""
        whole = self.tensors[name]
        return whole if index is None else whole.slice(index, num_slices)

    @property
    def gguf_file(self) -> Path | None:
        """The first file of a model in GGUF, which says what all of it is."""
        return next(iter(self.files.values())) if self.is_gguf else None

    def first_header(self) -> bytes:
        """What the first file holds before its tensors. Raises CheckpointError."""
        path = next(iter(self.files.values()))
        starts = (each.offset for each in self.tensors.values() if each.path == path)
        with readable(path), path.open("rb") as file:
            return file.read(min(starts, default=MAX_HEADER_BYTES))

    def require_unchanged(self) -> None:
        """Raises StorageError if a file was written again, or replaced, since it was looked at: so
        what has been opened by now is what headers and samples were read of."""
        for path, stamp in stamps_of(self.files).items():
            if stamp != self.stamps[path]:
                raise StorageError(changed(path))

    def look(self, name: str) -> StoredPart | None:
        """Dtype and shape of a tensor; None where there is no tensor `name`."""
        found = self.tensors.get(name)
        return StoredPart(name, found.dtype, found.shape) if found else None

    def find_format(
        self, name: str, shape: tuple[int, ...], likely: WeightFormat | None = None
    ) -> WeightFormat | None:
        """The format of the weight `name`, of that shape, perhaps the `likely` one; None where no
        format fits."""
        return self.formats.get(name) or find_format(name, shape, self.look, likely)

    def weight(
        self, name: str, shape: tuple[int, ...], likely: WeightFormat | None = None
    ) -> Weight:
        """The weight `name`, of that shape, which is there in one of the formats known, perhaps in
        the `likely` one."""
        stored = self.find_format(name, shape, likely)
        assert stored is not None, f"{name} is required before it is looked for"
        parts = stored.parts(name, shape)
        return Weight(name, stored, shape, tuple(self.tensors[part.name] for part in parts))

    def require(self, expected: Iterable[StoredPart]) -> None:
        """Raises CheckpointError unless all `expected` tensors are there, in their dtypes and
        shapes."""
        faults = [fault for part in expected if (fault := self._fault(part))]
        if faults:
            shown = faults[:_MAX_FAULTS]
            if len(faults) > len(shown):
                shown.append(f"and {len(faults) - len(shown)} more")
            said_by = "the metadata" if self.is_gguf else "config.json"
            raise CheckpointError(
                f"{self.folder}: the weights do not match {said_by}:\n  " + "\n  ".join(shown)
            )

    def _fault(self, part: StoredPart) -> str | None:
        if part.name not in self.tensors:
            return f"tensor {part.name} is missing"
        entry = self.tensors[part.name]
        if not part.has_shape(entry.shape):
            found, expected = list(entry.shape), list(part.shape)
            return f"tensor {part.name} has shape {found}, expected {expected}"
        if entry.dtype != part.dtype:
            return f"tensor {part.name} is {entry.dtype}, {_expected(part)}"
        return None


def stamps_of(files: Mapping[str, Path]) -> dict[Path, Stamp]:
    """What changes when one of the files is written again. Raises CheckpointError."""
    stamps = {}
    for path in files.values():
        with readable(path):
            stamps[path] = stamp_of(path.stat())
    return stamps


def require_model_folder(folder: Path) -> None:
    """Raises CheckpointError for what cannot be a model folder, and says what can."""
    try:
        message = _no_model_folder(folder)
    except PermissionError as error:
        message = f"cannot be read: {error.strerror}"
    if message:
        raise CheckpointError(f"{folder}: {message}")


def _no_model_folder(folder: Path) -> str:
    if not folder.exists():
        return "no such model folder; moebatch downloads none, so check the path"
    if not folder.is_dir():
        return "is a file; name its folder, with config.json, tokenizer and safetensors files"
    if (folder / "snapshots").is_dir() and not (folder / "config.json").exists():
        found = min((str(each) for each in (folder / "snapshots").iterdir()), default="none")
        return f"is a cache of downloads; name the folder of one of its snapshots ({found})"
    return ""


def file_inside(folder: Path, name: str) -> Path:
    """The file `name` of a model folder, with links resolved.

    Links may lead to another file of the folder or, in the Hugging Face cache, from
    ``snapshots/REVISION`` or a folder in it to ``blobs`` beside ``snapshots``; anywhere else raises
    CheckpointError.
    """
    if name != Path(name).name or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: file name {shown(name)} must not contain a path")
    try:
        path = (folder / name).resolve()
        is_file = path.is_file()
    except OSError as error:
        raise model_file_error(error, f"{folder}: file {shown(name)} cannot be found") from None
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: file {shown(name)}: {reason(error)}") from None
    inside = folder.resolve()
    blobs = [each.parent / "blobs" for each in inside.parents if each.name == "snapshots"]
    allowed = [inside, *blobs]
    if not any(path.is_relative_to(root) for root in allowed):
        raise CheckpointError(
            f"{folder}: {shown(name)} is a link that leads outside the model folder"
        )
    if not is_file:
        raise CheckpointError(f"{folder}: file {shown(name)} is missing")
    return path


def _expected(part: StoredPart) -> str:
    plain = [known.dtype for known in FORMATS.values() if isinstance(known, PlainFormat)]
    others = f"; numbers without scales may be {', '.join(plain)}" if part.dtype in plain else ""
    return f"expected {part.dtype}{others}"


def _indexed_tensors(
    folder: Path, weight_map: Mapping[str, str], paths: Mapping[str, Path]
) -> dict[str, Extent]:
    headers = {name: read_header(path) for name, path in paths.items()}
    tensors = {}
    for tensor, file in weight_map.items():
        if tensor not in headers[file]:
            raise CheckpointError(
                f"{folder}: {INDEX_NAME} places {shown(tensor)} in {shown(file)}, it is not there"
            )
        tensors[tensor] = headers[file][tensor]
    return tensors


def _weight_map(folder: Path) -> dict[str, str]:
    path = file_inside(folder, INDEX_NAME)
    weight_map = read_object(path, most_bytes=MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is empty or not a mapping")
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{path}: weight_map[{shown(tensor)}] is not a file name")
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: {shown(file)} is not a safetensors file; others are not read"
            )
    return weight_map


def _nothing_to_read(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder}: holds pickles only ({', '.join(pickles[:3])}), which can run code when "
            "read and are refused; convert the model to safetensors"
        )
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        return (
            f"{folder}: file '{INDEX_NAME}' is missing, which says what {shown(shards[0])} and "
            "others hold; get it where these come from"
        )
    return f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is there; is this a model folder?"
