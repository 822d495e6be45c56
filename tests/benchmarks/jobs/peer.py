"""Peers in environments of their own, on the same rows, under the same cap."""

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from tests.benchmarks.jobs.checkpoint import weight_files
from tests.benchmarks.jobs.estimate import PeerResult, Trial
from tests.benchmarks.jobs.memory_cap import drop_from_page_cache, memory_cap
from tests.benchmarks.jobs.run import RunFailed
from tests.benchmarks.jobs.setting import Setting

REPOSITORY = Path(__file__).parents[3]
_KILLED = (-9, 137)
_PATIENCE = 3
"""A peer that takes so many times longer than it may is stopped."""
_DRIVERS = "tests.benchmarks.jobs.peers"


@dataclass(frozen=True, kw_only=True)
class Peer(ABC):
    """Another program that can do the same jobs."""

    python: Path
    """Interpreter of an environment that has it."""
    longest_s: float
    """For the trials of one job together; the one at work then is waited for."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def first_batch(self) -> int:
        """Where trials begin."""

    @abstractmethod
    def arguments(self, setting: Setting, rows: Path, scratch: Path) -> list[str]:
        """Of Python: the driver, which prints a line of JSON for each trial, and its own.
        `scratch` is a folder that is empty."""

    @abstractmethod
    def prepare(self, setting: Setting) -> None:
        """Makes what the peer needs once. Raises RunFailed."""

    @abstractmethod
    def files(self, setting: Setting) -> Sequence[Path]:
        """That it reads."""

    def run(self, setting: Setting, rows: Path, num_rows: int) -> PeerResult:
        """Trials with larger and larger batches, until one is slower or gets killed; smaller ones
        if the first is killed."""
        first = min(self.first_batch, num_rows)
        while True:
            result = self._run_from(first, setting, rows)
            if result.trials or first == 1 or not result.was_killed:
                return result
            first = max(1, first // 4)

    def _run_from(self, first: int, setting: Setting, rows: Path) -> PeerResult:
        drop_from_page_cache(self.files(setting))
        log_path = setting.folder / f"{self.name}.log"
        with (
            memory_cap(setting.cap_bytes) as cap,
            TemporaryDirectory(dir=setting.folder) as scratch,
            log_path.open("w") as log,
        ):
            command = [str(self.python), "-m", *self.arguments(setting, rows, Path(scratch))]
            command += ["--first-batch", str(first), "--longest-s", str(self.longest_s)]
            output, code = _output(cap.wrapped(command), log, _PATIENCE * self.longest_s)
        return peer_result(self.name, output, code)


def peer_result(name: str, output: str, code: int | None) -> PeerResult:
    """What a driver has printed, and how it ended; None is by our clock."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    trials = [Trial(**line) for line in lines if "job_s" in line]
    tried = [line["trying"] for line in lines if "trying" in line]
    ended = next((line["ended"] for line in lines if "ended" in line), "")
    at = f" at batch {tried[-1]}" if len(tried) > len(trials) else ""
    if code is None:
        ended = f"took too long{at}"
    elif code in _KILLED:
        ended = f"killed{at or ' while loading'}: out of memory"
    elif code != 0:
        ended = f"exit code {code}{at}"
    return PeerResult(name=name, trials=trials, ended=ended, was_killed=code in _KILLED)


def _output(command: Sequence[str], log: TextIO, longest_s: float) -> tuple[str, int | None]:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=longest_s,
            cwd=REPOSITORY,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(), None
    return done.stdout, done.returncode


@dataclass(frozen=True, kw_only=True)
class Accelerate(Peer):
    """transformers with disk offload."""

    memory: str = "1GiB"
    """Of weights that stay in memory."""

    @property
    def name(self) -> str:
        return "accelerate"

    def prepare(self, setting: Setting) -> None:
        """It reads the checkpoint as it is."""

    def files(self, setting: Setting) -> Sequence[Path]:
        return weight_files(setting.checkpoint)

    @property
    def first_batch(self) -> int:
        return 8

    def arguments(self, setting: Setting, rows: Path, scratch: Path) -> list[str]:
        module = f"{_DRIVERS}.accelerate_driver"
        more = ["--memory", self.memory, "--folder", str(scratch)]
        return [module, str(setting.checkpoint), str(rows), *more]


@dataclass(frozen=True, kw_only=True)
class LlamaCpp(Peer):
    """llama.cpp with memory-mapped weights."""

    trial_s: float = 60.0
    sources: Path | None = None
    """Of llama.cpp, whose converter makes its file of weights."""

    @property
    def name(self) -> str:
        return "llama.cpp"

    def prepare(self, setting: Setting) -> None:
        path = self._model(setting)
        if path.is_file():
            return
        if self.sources is None:
            raise RunFailed(f"{path} is made by the converter of llama.cpp: --llama-sources FOLDER")
        partial = path.with_name(f"{path.name}.partial")
        command = [sys.executable, "-m", f"{_DRIVERS}.gguf_driver"]
        command += [str(setting.checkpoint), str(partial), str(self.sources)]
        if subprocess.run(command, check=False, cwd=REPOSITORY).returncode:
            partial.unlink(missing_ok=True)
            raise RunFailed("its converter fails, as it says above")
        partial.rename(path)

    def files(self, setting: Setting) -> Sequence[Path]:
        return [self._model(setting)]

    @property
    def first_batch(self) -> int:
        return 64

    def arguments(self, setting: Setting, rows: Path, scratch: Path) -> list[str]:
        module = f"{_DRIVERS}.llama_driver"
        model = self._model(setting)
        mapped = ["--mapped"] if model.stat().st_size > setting.cap_bytes else []
        return [module, str(model), str(rows), "--seconds", str(self.trial_s), *mapped]

    @staticmethod
    def _model(setting: Setting) -> Path:
        return setting.checkpoint.with_name(f"{setting.checkpoint.name}.gguf")
