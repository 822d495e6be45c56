"""Whether there is a compiled kernel, and the kernel."""

import ctypes
import functools
import importlib.resources
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from moebatch.model.native.compiler import Compiler, NotCompiled, cache_folder, is_ours
from moebatch.model.native.kernel import Kernel

SWITCH = "MOEBATCH_NATIVE"
"""Environment variable: ``0`` leaves everything to torch."""
SOURCE = "decode_attention.c"


def kernel() -> Kernel | None:
    """The kernel, compiled if this is the first call on this machine (seconds); None without."""
    found = _kernel_or_reason()
    return found if isinstance(found, Kernel) else None


def status() -> str:
    """``compiled``, or why torch attends instead."""
    found = _kernel_or_reason()
    return "compiled" if isinstance(found, Kernel) else found


def _kernel_or_reason() -> Kernel | str:
    return f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else _loaded()


@functools.cache
def _loaded() -> Kernel | str:
    return load(os.environ)


def load(environment: Mapping[str, str]) -> Kernel | str:
    """The kernel, or why there is none. Uses ``CC``, ``XDG_CACHE_HOME`` and ``HOME``."""
    source = importlib.resources.files(__package__).joinpath(SOURCE).read_text()
    try:
        compiler = Compiler.found(environment)
        folder = cache_folder(environment)
        if folder is not None:
            return Kernel(_kept(compiler, source, folder))
        with tempfile.TemporaryDirectory(prefix="moebatch-") as name:
            # Once loaded, the library needs no file.
            return Kernel(_made(compiler, source, Path(name) / "kernel.so"))
    except NotCompiled as error:
        return str(error)
    except OSError as error:
        return f"the compiled kernel cannot be kept or loaded: {error}"


def _kept(compiler: Compiler, source: str, folder: Path) -> ctypes.CDLL:
    path = folder / compiler.name_of(source)
    if is_ours(path):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            pass  # damaged, say by a full disk: made anew
    return _made(compiler, source, path)


def _made(compiler: Compiler, source: str, path: Path) -> ctypes.CDLL:
    compiler.compile(source, path)
    return ctypes.CDLL(str(path))
