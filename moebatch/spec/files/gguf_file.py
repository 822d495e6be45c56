"""What the path of a model in GGUF may be."""

import os
from pathlib import Path


def is_gguf_file(path: Path) -> bool:
    """Whether it names a file in that format; a folder may have such a name too, and a file that
    is missing or hidden is missed where it is read."""
    return path.suffix == ".gguf" and not os.path.isdir(path)  # noqa: PTH112  raises nothing
