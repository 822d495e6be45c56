"""Writes the experts of a model in fewer bits, file by file; a pack that was broken off goes on
behind the last whole file."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

import moebatch
from moebatch.advance import Advance, unwatched
from moebatch.calibration.perplexity import Perplexity, TextOrder, measure_perplexity
from moebatch.checkpoint.header import Extent
from moebatch.checkpoint.index import INDEX_NAME, file_inside
from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.errors import CheckpointError, ConfigError, DoesNotFit, StorageError
from moebatch.folder.work_folder import WorkFolder
from moebatch.job.identity import numerics_fingerprint
from moebatch.journal.files import Files, storage_errors
from moebatch.packing.contents import Contents
from moebatch.packing.encodings import Encoding, Fp8Blocks, Int4, Int8, group_of
from moebatch.packing.expert_encoder import Error, ExpertEncoder, encoder_bytes
from moebatch.packing.gains import measure_gains, popularity_source
from moebatch.packing.order import PackOrder
from moebatch.packing.precision import TradeOffPoint, choose_precisions
from moebatch.packing.shards import Shard, ShardWriter, tensor_bytes, weight_map, writing
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.spec.files.json_file import read_json
from moebatch.spec.files.text_file import write_text
from moebatch.spec.model.named_formats import why_unpacked
from moebatch.store.memory import resident_bytes
from moebatch.units import format_bytes, format_unlike

REPORT = Path("moebatch", "pack.json")
"""In a packed model: what it was made of and how, and what that cost."""
_COPY_BYTES = 2**24
_WEIGHT_FILES = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".h5", ".msgpack", ".onnx")
)
_NOT_COPIED = frozenset(("config.json", INDEX_NAME, "SHA256SUMS"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSummary:
    """What a pack has come to."""

    folder: Path
    was_there: bool
    """An earlier run of the same command had ended it."""
    contents: Contents
    record: "PackRecord"
    run_s: float
    perplexities: tuple[Perplexity, Perplexity] | None = None
    """Of the text, before and after."""


class PackRecord(BaseModel):
    """How far a pack has come, and what it has found out."""

    fingerprint: str
    """Of everything that decides over what is written."""
    relative_errors: dict[int, float] = {}
    """|decoded - weight| / |weight| of all experts of a layer, by layer, of those whose file is
    whole."""
    in_int8: list[ExpertKey] | None = None
    """Experts that stay wide, where some do."""
    trade_off: list[TradeOffPoint] | None = None
    """What other numbers of bits would be worth, where some do."""

    @property
    def wide(self) -> frozenset[ExpertKey]:
        """Those experts."""
        return frozenset(self.in_int8 or ())


class Pack:
    """One pack of a model."""

    def __init__(
        self,
        order: PackOrder,
        log: Callable[[str], None],
        advance: Advance = unwatched,
    ) -> None:
        """`log` gets lines for the user; `advance` the share of the files, 0 to 1, that is
        written."""
        self._order = order
        self._text = None
        if order.text is not None:
            self._text = TextOrder(
                path=order.text, num_tokens=order.num_tokens, dram_bytes=order.dram_bytes
            )
        self._log = log
        self._advance = advance
        self.num_kept = 0
        """Files that need not be written again, should it be broken off now."""

    def execute(self) -> PackSummary:
        """Writes what is missing.

        Raises CheckpointError for a model that cannot be packed, ConfigError for a place that is
        taken, DoesNotFit, StorageError, and LockHeld if another process does the same.
        """
        order, begun = self._order, time.perf_counter()
        files = open_model(order.model, "auto")
        _require_packable(files)
        _others(files.checkpoint.folder)  # what is wrong with them is said before hours of work
        encodings = self._encodings(files)
        fingerprint = self._fingerprint(files, encodings)
        path = order.folder.parent / f"{order.folder.name}.packing"  # the root has no name
        lock = path.with_name(f"{path.name}.lock")  # NAME.lock may be the user's
        work = WorkFolder(path, subject=order.folder, lock=lock)
        record = _finished(order.folder, fingerprint)
        was_there = record is not None
        if record is None:
            self._require_memory(Contents(files, encodings))
            with work.locked():
                record = self._begun(work, fingerprint, files, encodings)
                contents = Contents(files, encodings, record.wide)
                self._write_missing(work, record, contents)
                self._finish(work, record, contents)
        elif self._record_of(work).exists():  # killed when it had all but ended
            with work.locked():
                self._record_of(work).unlink(missing_ok=True)
        return PackSummary(
            folder=order.folder,
            was_there=was_there,
            contents=Contents(files, encodings, record.wide),
            record=record,
            run_s=time.perf_counter() - begun,
            perplexities=self._perplexities(),
        )

    def _perplexities(self) -> tuple[Perplexity, Perplexity] | None:
        order, text = self._order, self._text
        if text is None:
            return None
        self._log(f"reading {text.path} with both")
        before = measure_perplexity(order.model, text, self._log)
        return before, measure_perplexity(order.folder, text, self._log)

    def _encodings(self, files: ModelFiles) -> tuple[Encoding, ...]:
        """What experts may be written as; the second one is for those that stay wide."""
        if self._order.to == "fp8":
            return (Fp8Blocks(),)
        if self._order.to == "int8":
            return (Int8(files.dtype),)
        sizes = files.shape.expert.matrices(files.shape.expert_size).values()
        int4 = Int4(group_of([size[1] for size in sizes], self._order.group), files.dtype)
        return (int4,) if self._order.bits is None else (int4, Int8(files.dtype))

    def _fingerprint(self, files: ModelFiles, encodings: Sequence[Encoding]) -> str:
        """Stands for everything that decides over what is written."""
        order, digest = self._order, hashlib.blake2b(digest_size=16)
        parts: list[object] = [moebatch.__version__, numerics_fingerprint(files)]
        parts += [files.sample, [encoding.scheme for encoding in encodings]]
        if order.bits is not None:
            parts += [order.bits, popularity_source(files, self._text)]
        digest.update(repr(parts).encode())
        return digest.hexdigest()

    def _require_memory(self, contents: Contents) -> None:
        """Raises DoesNotFit."""
        limit, held, work = self._order.dram_bytes, resident_bytes(), encoder_bytes(contents)
        if limit is not None and held + work + _COPY_BYTES > limit:
            needed, there = format_unlike(held + work + _COPY_BYTES, limit)
            raise DoesNotFit(
                f"dram: packing needs {needed} (the program {format_bytes(held)}, an expert and "
                f"what it becomes {format_bytes(work)}), there are {there}; raise --dram"
            )

    def _record_of(self, work: WorkFolder) -> Path:
        """Where the record is once the folder has its name."""
        return self._order.folder / work.record.name

    def _begun(
        self,
        work: WorkFolder,
        fingerprint: str,
        files: ModelFiles,
        encodings: tuple[Encoding, ...],
    ) -> PackRecord:
        """What an earlier run has left, or a new record, when it is known which experts stay
        wide."""
        record = work.load(PackRecord)
        if record is not None:
            if record.fingerprint != fingerprint:
                raise _taken(work.path, "holds an unfinished pack of something else")
            return record
        if self._order.bits is None:
            return PackRecord(fingerprint=fingerprint)
        self._log("looking for experts that are worth eight bits")
        gains = measure_gains(Contents(files, encodings), self._text, self._log)
        wide, curve = choose_precisions(gains, self._order.bits)
        return PackRecord(fingerprint=fingerprint, in_int8=sorted(wide), trade_off=curve)

    def _write_missing(self, work: WorkFolder, record: PackRecord, contents: Contents) -> None:
        """Writes all files that are not whole, and the error of each layer."""
        errors = record.relative_errors
        missing = [shard for shard in contents.shards if not _is_kept(shard, work.path, errors)]
        self.num_kept = len(contents.shards) - len(missing)
        if self.num_kept:
            self._log(f"{self.num_kept} of {len(contents.shards)} files were written before")
        _require_room(work.path, sum(shard.num_bytes for shard in missing))
        work.save(record)
        with ExpertEncoder(contents) as encoder:
            for shard in missing:
                with writing(shard, work.path) as writer:
                    if shard.layer is None:
                        _copy(shard, contents.files, writer)
                    else:
                        errors[shard.layer] = self._encode(shard.layer, contents, encoder, writer)
                work.save(record)
                self.num_kept += 1

    def _encode(
        self, layer: int, contents: Contents, encoder: ExpertEncoder, writer: ShardWriter
    ) -> float:
        """Writes the experts of a layer; returns their error."""
        error, keys = Error(), contents.keys_of(layer)
        for number, key in enumerate(keys, start=1):
            for part, tensor in encoder.encoded(key, contents.encoding_of(key), error):
                writer.write(part, tensor_bytes(tensor))
            self._advance((self.num_kept + number / len(keys)) / len(contents.shards))
        for part, tensor in contents.constants(layer):
            writer.write(part, tensor_bytes(tensor))
        return error.relative

    def _finish(self, work: WorkFolder, record: PackRecord, contents: Contents) -> None:
        """Adds what is no weight, and gives the folder its name, in one step."""
        path, output = work.path, self._order.folder
        total = contents.weight_bytes[1]
        index = {"metadata": {"total_size": total}, "weight_map": weight_map(contents.shards)}
        report = {"moebatch": moebatch.__version__, **record.model_dump(mode="json")}
        with storage_errors(path):
            for name, other in _others(contents.files.checkpoint.folder).items():
                shutil.copyfile(other, path / name)
            (path / REPORT).parent.mkdir(exist_ok=True)
        write_text(path / REPORT, json.dumps(report, indent=2) + "\n")
        write_text(path / INDEX_NAME, json.dumps(index, indent=2) + "\n")
        write_text(path / "config.json", json.dumps(contents.config, indent=2) + "\n")
        with storage_errors(output):
            if output.exists():
                raise _taken(output, "is there by now")
            Files().sync_folder(path)
            path.rename(output)
            Files().sync_folder(output.parent)
            self._record_of(work).unlink()


def _require_packable(files: ModelFiles) -> None:
    """Raises CheckpointError for experts that cannot be written, and for quantised weights that are
    no experts': a configuration names one method only."""
    reason = why_unpacked(files.shape)
    if reason is not None:
        raise CheckpointError(f"{files.checkpoint.folder}: {reason}; this model cannot be packed")
    if files.checkpoint.is_gguf:
        raise CheckpointError(
            f"{files.checkpoint.folder}: weights of a GGUF file have names and an order of "
            "their own; pack the model as it is published in bfloat16"
        )
    for _, role, weight in files.weights_beside_experts():
        if not weight.format.is_tiled:
            raise CheckpointError(
                f"{files.checkpoint.folder}: weights outside the experts are quantised "
                f"({role}: {weight.format}); pack the model as it is published in bfloat16"
            )


def _finished(output: Path, fingerprint: str) -> PackRecord | None:
    """That of a pack that has ended; None if there is no folder of that name.

    Raises ConfigError for a folder that is something else, or would be in none.
    """
    if not output.parent.exists():
        message = f"the folder {output.parent} does not exist; make it first"
        raise ConfigError.at(output, message)
    if not output.exists() and not output.is_symlink():
        return None
    with suppress(OSError, ValueError):
        record = PackRecord.model_validate(read_json(output / REPORT))
        if record.fingerprint == fingerprint:
            return record
    raise _taken(output, "is there, and is no pack of these weights in this way")


def _taken(path: Path, why: str) -> ConfigError:
    message = f"{why}; nothing is written over it: choose another --output, or remove it"
    return ConfigError.at(path, message)


def _is_kept(shard: Shard, folder: Path, errors: Mapping[int, float]) -> bool:
    """Whether a file is whole, and what it cost is known."""
    with suppress(OSError):
        is_whole = (folder / shard.name).stat().st_size == shard.num_bytes
        return is_whole and (shard.layer is None or shard.layer in errors)
    return False


def _require_room(folder: Path, num_bytes: int) -> None:
    """Raises StorageError before hours of work end for lack of it."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        needed, there = format_unlike(num_bytes, free)
        raise StorageError(
            f"{folder}: no room: {needed} to write, {there} free; make room, or choose another "
            "--output"
        )


def _copy(shard: Shard, files: ModelFiles, writer: ShardWriter) -> None:
    """Writes tensors as they are. Raises OSError for what is written, and StorageError."""
    for part in shard.parts:
        for data in _blocks(files.checkpoint.tensors[part.name]):
            writer.write(part, data)


def _blocks(extent: Extent) -> Iterator[bytes]:
    left = extent.num_bytes
    if not left:
        yield b""  # a tensor without numbers has its turn as well
    with storage_errors(extent.path), extent.path.open("rb") as file:
        file.seek(extent.offset)
        while left:
            data = file.read(min(left, _COPY_BYTES))
            if not data:
                raise OSError("the file ends too early")
            left -= len(data)
            yield data


def _others(source: Path) -> dict[str, Path]:
    """Tokenizer, templates and whatever else lies beside the weights, by name. Raises
    CheckpointError for links that lead elsewhere."""
    found = {}
    for path in sorted(source.iterdir()):
        is_weight = path.suffix.lower() in _WEIGHT_FILES or ".safetensors." in path.name
        is_other = path.is_file() and not path.name.startswith(".") and not is_weight
        if is_other and path.name not in _NOT_COPIED:
            found[path.name] = file_inside(source, path.name)
    return found
