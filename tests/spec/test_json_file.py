"""What a file of unknown origin may cost to read."""

import tracemalloc
from pathlib import Path

from moebatch.spec.files.json_file import read_json


def test_a_short_file_takes_no_more_memory_than_it_has_bytes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    tracemalloc.start()
    try:
        assert read_json(tmp_path / "tokenizer.json", most_bytes=2**26) == {}
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
