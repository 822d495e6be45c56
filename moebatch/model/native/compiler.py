"""The system's C compiler, and a folder that keeps what it has made."""

import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from moebatch.quoting import shown, system_reason

_NAMES = ("cc", "gcc", "clang")
_FLAGS = ("-O3", "-std=gnu11", "-fopenmp-simd", "-fPIC")
_LONGEST_S = 600
_SHORT_S = 0.1
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SEAL_BYTES = 32


class NotCompiled(Exception):
    """Why there is no library; one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """What is compiled, and how; a compiler is looked for only when it is needed."""

    sources: tuple[str, ...]
    """Parts of it, which are compiled side by side."""
    flags: tuple[str, ...]
    """Beside those that all have: the instruction set."""
    compiler: str
    """The command that ``$CC`` names; empty for the first of the usual names in `path`."""
    path: str | None

    @property
    def name(self) -> str:
        """A file name: the same only where the library would do as well.

        The processor counts, since nodes of a cluster may share a folder.
        """
        made_of = (*self.sources, self.compiler, *_FLAGS, *self.flags, _processor())
        return hashlib.sha256(os.fsencode("\0".join(made_of))).hexdigest()[:32] + ".so"

    @property
    def command(self) -> list[str]:
        """The compiler. Raises NotCompiled if there is none."""
        try:
            said = shlex.split(self.compiler)
        except ValueError as error:
            raise NotCompiled(
                f"CC is {shown(self.compiler)}, which is no command: {error}"
            ) from None
        if said and shutil.which(said[0], path=self.path) is None:
            raise NotCompiled(f"CC is {shown(self.compiler)}: there is no such command; install it")
        return said or _first_in(self.path)

    def compile(self, target: Path) -> None:
        """Makes the library, its parts at the same time; `target` is there whole or not at all.
        Whatever breaks it off, such as the handler of a signal, ends the compilers at once.

        Raises NotCompiled when there is no compiler or it fails, OSError when `target` cannot be
        written.
        """
        command = self.command

        def compile_part(source: str, name: str) -> None:
            chosen = (*_FLAGS, *self.flags)
            running.run([*command, *chosen, "-c", "-x", "c", "-", "-o", name], source)

        with (
            tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as folder,
            ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads,
            _Running() as running,
        ):
            names = [f"{folder}/{number}.o" for number in range(len(self.sources))]
            _wait_for(
                [
                    threads.submit(compile_part, *part)
                    for part in zip(self.sources, names, strict=True)
                ]
            )
            made = Path(folder, target.name)
            link = [*command, "-shared", *names, "-o", str(made)]
            _wait_for([threads.submit(running.run, link, "")])
            linked = made.read_bytes()
            made.write_bytes(linked + _seal(linked))
            made.chmod(0o500)
            made.replace(target)


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """The user's folder for compiled libraries, made if need be; None where none can be used. One
    that cannot be written may have been filled before, as in the image of a container.

    No other user may write there: nothing asks where a library comes from that is loaded.
    """
    cache, home = environment.get("XDG_CACHE_HOME", ""), environment.get("HOME", "")
    # Relative paths there are to be ignored, says the XDG base directory specification.
    base = Path(cache) if Path(cache).is_absolute() else Path(home, ".cache")
    folder = base / "moebatch"
    if not folder.is_absolute():
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        may_load = not os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        return None
    return folder if may_load and is_ours(folder) and os.access(folder, os.X_OK) else None


def may_keep(folder: Path) -> bool:
    """Whether libraries can be put there."""
    return os.access(folder, os.W_OK)


def is_ours(path: Path) -> bool:
    """Whether it is there, belongs to this user, and no other may write it."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & _OTHERS_MAY_WRITE


def is_whole(path: Path) -> bool:
    """Whether all of it is as it was compiled: to load one that is not may end the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_SEAL_BYTES:] == _seal(content[:-_SEAL_BYTES])


def _seal(linked: bytes) -> bytes:
    """Stands behind a library, where nothing else looks."""
    return hashlib.sha256(linked).digest()


def _first_in(path: str | None) -> list[str]:
    for name in _NAMES:
        found = shutil.which(name, path=path)
        if found is not None:
            return [found]
    raise NotCompiled(
        f"there is no C compiler: none of {', '.join(_NAMES)} is in the path; install one"
    )


def _wait_for(commands: Iterable["Future[None]"]) -> None:
    """In short waits: a signal that comes just before a long one, or to another thread, would be
    handled only when that is over, since handlers run in the main thread alone."""
    for command in commands:
        while not wait((command,), _SHORT_S).done:
            pass
        command.result()


class _Running:
    """Commands that are run by other threads, and end with the block: no signal is handled there,
    and so none comes between the start of a command and the note of it."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []
        self._is_over = False
        self._changing = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        with self._changing:
            self._is_over = True
            for process in self._started:
                if process.poll() is None:
                    _end(process)

    def run(self, command: Sequence[str], text: str) -> None:
        """Returns when a command that reads a text has succeeded. Raises NotCompiled."""
        try:
            process = self._start(command)
            _, stderr = process.communicate(text, timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            with suppress(BrokenPipeError), process:  # waits, and closes its pipes
                _end(process)
            why = f"did not end within {_LONGEST_S} seconds; is the machine busy?"
            raise NotCompiled(f"{command[0]} {why}") from None
        except (OSError, subprocess.SubprocessError) as error:
            raise NotCompiled(f"{command[0]} cannot be run: {system_reason(error)}") from error
        if process.returncode != 0:
            said = stderr.strip().splitlines() or [f"exit code {process.returncode}"]
            # Lines before it say where it is, if not what.
            why = next((line for line in said if "error" in line.lower()), said[0])
            raise NotCompiled(f"{command[0]} failed: {why}")

    def _start(self, command: Sequence[str]) -> "subprocess.Popen[str]":
        with self._changing:
            if self._is_over:
                raise NotCompiled("it was broken off")
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="backslashreplace",  # what is said may name files in any encoding
                process_group=0,
            )
            self._started.append(process)
        return process


def _end(process: "subprocess.Popen[str]") -> None:
    """One alone would leave those going on that do its work; a signal that cannot be heard, its
    files in /tmp."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)


@functools.cache
def _processor() -> str:
    """What the compiler looks at for this machine."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return " ".join(platform.uname())
    # Frequencies change from one reading to the next.
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "CPU part", "Features")
    return "\n".join(line for line in first if line.partition(":")[0].strip() in wanted)
