"""Whether there are compiled kernels, and these."""

import ctypes
import functools
import importlib.resources
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from moebatch.model.native.compiler import Compiler, NotCompiled, cache_folder, is_ours
from moebatch.model.native.kernels import Kernels

SWITCH = "MOEBATCH_NATIVE"
"""Environment variable: ``0`` leaves everything to torch."""
_SOURCES = (
    "numbers.h",
    "decode_attention.c",
    "tile_products.h",
    "slice_layout.h",
    "slice_attention.c",
    "elementwise.c",
)


def kernels() -> Kernels | None:
    """The kernels, compiled if this is the first call on this machine (seconds); None without."""
    found = _kernels_or_reason()
    return found if isinstance(found, Kernels) else None


def prepare() -> str | None:
    """Has them compiled where that has not been done. Why torch does their work; None if not.

    Best done before memory is planned: a compiler takes some, too.
    """
    found = _kernels_or_reason()
    return None if isinstance(found, Kernels) else found


def source() -> str:
    """What is compiled: all files, as one."""
    folder = importlib.resources.files(__package__)
    return "\n".join(folder.joinpath(name).read_text() for name in _SOURCES)


def _kernels_or_reason() -> Kernels | str:
    return f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else _loaded()


@functools.cache
def _loaded() -> Kernels | str:
    return load(os.environ)


def load(environment: Mapping[str, str]) -> Kernels | str:
    """The kernels, or why there are none. Uses ``CC``, ``XDG_CACHE_HOME`` and ``HOME``."""
    try:
        compiler = Compiler.found(environment)
        folder = cache_folder(environment)
        if folder is not None:
            return Kernels(_kept(compiler, folder))
        with tempfile.TemporaryDirectory(prefix="moebatch-") as name:
            # Once loaded, the library needs no file.
            return Kernels(_made(compiler, Path(name) / "kernels.so"))
    except NotCompiled as error:
        return str(error)
    except OSError as error:
        return f"the compiled kernels cannot be kept or loaded: {error}"


def _kept(compiler: Compiler, folder: Path) -> ctypes.CDLL:
    path = folder / compiler.name_of(source())
    if is_ours(path):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            pass  # damaged, say by a full disk: made anew
    return _made(compiler, path)


def _made(compiler: Compiler, path: Path) -> ctypes.CDLL:
    compiler.compile(source(), path)
    return ctypes.CDLL(str(path))
