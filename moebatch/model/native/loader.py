"""Whether there are compiled kernels, and these."""

import contextlib
import ctypes
import functools
import importlib.resources
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from moebatch.model.native import instruction_set
from moebatch.model.native.compiler import (
    Library,
    NotCompiled,
    cache_folder,
    is_ours,
    is_whole,
    may_keep,
)
from moebatch.model.native.kernels import Kernels

SWITCH = "MOEBATCH_NATIVE"
"""Environment variable: ``0`` leaves everything to torch."""
_SOURCES = (
    "numbers.h",
    "team.c",
    "attention_work.h",
    "decode_attention.c",
    "tile_products.h",
    "slice_layout.h",
    "slice_attention.c",
    "elementwise.c",
    "delta_rule.c",
    "selective_scan.c",
    "codes.h",
    "products.c",
)
_PARTS = (
    "PRODUCTS",
    "CACHED_BFLOAT16",
    "CACHED_INT8",
    "CACHED_FP8",
    "CACHED_FLOAT32",
    "CACHED_FLOAT16",
    "THE_REST",
)
"""What functions that are called from outside are of, those first for which a compiler takes long.
Compilers that work side by side have a part each."""


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


def log_compiling(log: Callable[[str], None], environment: Mapping[str, str] = os.environ) -> None:
    """Gives `log` a line if `prepare` is going to compile."""
    if _loaded.cache_info().currsize or not needs_compiling(environment):
        return
    with contextlib.suppress(NotCompiled):
        if _library(environment).command:
            log(f"compiling kernels, {_how_often(environment)}")


def _how_often(environment: Mapping[str, str]) -> str:
    folder = cache_folder(environment)
    if folder is not None and may_keep(folder):
        return "once (10 to 30 seconds)"
    return (
        "in each run (10 to 30 seconds): no folder keeps them; set XDG_CACHE_HOME to one of yours"
    )


def source(part: str | None = None) -> str:
    """What is compiled: all files, as one. The functions of other parts are unused, so that a
    compiler leaves them out."""
    folder = importlib.resources.files(__package__)
    unused = {each: "static __attribute__((unused))" for each in _PARTS if part not in (None, each)}
    begins = (f"#define OF_{each} {unused.get(each, '')}" for each in _PARTS)
    return "\n".join([*begins, *(folder.joinpath(name).read_text() for name in _SOURCES)])


def _kernels_or_reason() -> Kernels | str:
    return f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else _loaded()


@functools.cache
def _loaded() -> Kernels | str:
    return load(os.environ)


def load(environment: Mapping[str, str]) -> Kernels | str:
    """The kernels, or why there are none. Uses ``MOEBATCH_ISA``, ``CC``, ``PATH``,
    ``XDG_CACHE_HOME`` and ``HOME``.

    Raises ConfigError for an instruction set that this processor lacks.
    """
    library, name = _library(environment), instruction_set.chosen(environment)
    is_forced = name != instruction_set.highest()
    try:
        folder = cache_folder(environment)
        made = _made_for_now(library) if folder is None else _kept(library, folder)
        return Kernels(made, is_forced=is_forced)
    except NotCompiled as error:
        return str(error)
    except OSError as error:
        return f"the compiled kernels cannot be kept or loaded: {error}"


def needs_compiling(environment: Mapping[str, str]) -> bool:
    """Whether `load` would take the seconds of a compiler."""
    folder = cache_folder(environment)
    is_off = environment.get(SWITCH) == "0"
    return not is_off and (folder is None or not is_ours(folder / _library(environment).name))


def _library(environment: Mapping[str, str]) -> Library:
    flags = instruction_set.compiler_flags(instruction_set.chosen(environment))
    return Library(
        sources=tuple(map(source, _PARTS)),
        flags=flags,
        compiler=environment.get("CC", ""),
        path=environment.get("PATH"),
    )


def _kept(library: Library, folder: Path) -> ctypes.CDLL:
    path = folder / library.name
    # One that is damaged, say by a disk or a crash of the machine, is made anew.
    if is_ours(path) and is_whole(path):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path))
    return _made(library, path) if may_keep(folder) else _made_for_now(library)


def _made_for_now(library: Library) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="moebatch-") as temporary:
        # Once loaded, the library needs no file.
        return _made(library, Path(temporary) / "kernels.so")


def _made(library: Library, path: Path) -> ctypes.CDLL:
    library.compile(path)
    return ctypes.CDLL(str(path))
