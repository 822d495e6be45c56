"""Files of lines, plain or compressed, as streams of raw rows; JSON lines among them."""

import gzip
import io
import os
import shlex
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from moebatch.errors import InputError, StorageError
from moebatch.journal.files import Stamp, stamp_of
from moebatch.quoting import reason
from moebatch.rows.row import RawRow
from moebatch.rows.strict_json import NOT_JSON
from moebatch.spec.request import RowError
from moebatch.units import format_bytes

MAX_LINE_BYTES = 16 * 2**20
"""A longer line is an error of its row. Parsing may take a hundred times as much memory."""
_BOM = b"\xef\xbb\xbf"
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPED = b"\x2a\x4d\x18"
"""Behind a byte from 0x50 to 0x5f: a frame that decoders pass over, with which pzstd begins."""
_UTF_16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")
CHANGED = "was changed while the job ran; rows that have ended are kept, run the job again"


@dataclass(frozen=True, kw_only=True, slots=True)
class LineSource:
    """Rows of a file that is read from its beginning, decompressed."""

    path: Path
    rows: Callable[[Path, BinaryIO], Iterator[RawRow]]
    """Those of a file's content; raises InputError."""
    stamp: Stamp
    """What `stamp_of` said when the source was opened."""

    def __iter__(self) -> Iterator[RawRow]:
        """The rows; raises InputError if the file is damaged or has changed in between."""
        line: int | None = 0
        try:
            with self.path.open("rb") as file:
                if stamp_of(os.fstat(file.fileno())) != self.stamp:
                    raise InputError.at(self.path, CHANGED)
                for row in self.rows(self.path, _decompressed(self.path, file)):
                    line = row.line
                    yield row
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise StorageError(f"{self.path}: reading failed: {error.strerror}") from error
            place = f"behind line {line}" if line else "before any row can be read"
            raise InputError.at(self.path, f"{_damage(error, place)}; get the file again") from None


def json_rows(path: Path, stream: BinaryIO) -> Iterator[RawRow]:
    """One for each line that is not blank, which ends at a newline only."""
    index = 0
    for line, content in enumerate(_lines(stream), start=1):
        if line == 1:
            content = _first_line(path, content)
        if isinstance(content, RowError) or content.strip():
            yield RawRow(index=index, line=line, content=content)
            index += 1


def _lines(stream: BinaryIO) -> Iterator[bytes | RowError]:
    while data := stream.readline(MAX_LINE_BYTES + 1):
        if len(data) <= MAX_LINE_BYTES or data.endswith(b"\n"):
            yield data.removesuffix(b"\n").removesuffix(b"\r")
            continue
        del data
        limit = format_bytes(MAX_LINE_BYTES)
        message = (
            f"the line is longer than {limit}, the most that is read as one row; shorten it, or "
            "divide it into several rows"
        )
        yield RowError(status=400, code=NOT_JSON, message=message)
        while (rest := stream.readline(2**16)) and not rest.endswith(b"\n"):
            pass


def _first_line(path: Path, content: bytes | RowError) -> bytes | RowError:
    """Without a byte order mark; raises InputError if the file as a whole is of another kind."""
    if isinstance(content, RowError):
        return content
    content = without_mark(path, content)
    begun = content.strip()
    if begun.startswith(b"["):
        raise _other_json(path, "is a JSON array", "'.[]'")
    if begun == b"{":
        raise _other_json(path, "has a JSON object over several lines", ".")
    return content


def without_mark(path: Path, beginning: bytes) -> bytes:
    """The beginning of a file without a byte order mark; raises InputError for one that is not of
    UTF-8."""
    if beginning.startswith(_UTF_16_OR_32):
        raise InputError.at(path, "is UTF-16 or UTF-32; save it as UTF-8", line=1)
    return beginning.removeprefix(_BOM)


def _other_json(path: Path, what: str, of_each: str) -> InputError:
    message = (
        f"{what}; JSON lines are needed, one object per line "
        f"(jq -c {of_each} {shlex.quote(str(path))} > rows.jsonl makes them)"
    )
    return InputError.at(path, message, line=1, code=NOT_JSON)


def _decompressed(path: Path, file: BinaryIO) -> BinaryIO:
    head = file.read(4)
    file.seek(0)
    if head.startswith(_GZIP_MAGIC):
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    if head == _ZSTD_MAGIC or (head[1:] == _ZSTD_SKIPPED and head[0] >> 4 == 5):
        return _zstd(path)(file)
    if path.suffix.lower() in (".gz", ".zst") and head:
        raise InputError.at(path, f"is not {path.suffix[1:]} data although its name says so")
    return file


def _damage(error: Exception, place: str) -> str:
    if isinstance(error, EOFError) or "Truncated" in str(error):
        return f"the compressed data ends early, {place}"
    return f"the compressed data is damaged {place}: {reason(error)}"


def _zstd(path: Path) -> Callable[[BinaryIO], BinaryIO]:
    try:
        import pyarrow

        if not pyarrow.Codec.is_available("zstd"):
            raise ImportError("pyarrow was built without zstd")
    except ImportError:
        message = "is zstd data, which pyarrow would decode; install it, or unzstd the file"
        raise InputError.at(path, message) from None
    return lambda file: io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
