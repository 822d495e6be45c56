"""The command in processes of its own, forked from one that has imported everything: a process of
its own for each call, without the seconds of imports."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import IO, Any

from tests.patience import PATIENCE_S


def moebatch(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The real command in a process of its own, without a terminal."""
    words = [*map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        places = [str(Path(folder) / name) for name in ("out", "err")]
        asked = {"words": words, "environment": {**os.environ, **environment}, "places": places}
        answered = _server().ask({**asked, "folder": str(Path.cwd())})
        out, err = (Path(place).read_text() for place in places)
    return subprocess.CompletedProcess(words, answered["code"], out, err)


def carried_out_without(modules: str, *arguments: object) -> str:
    """What a command prints that is carried out in an interpreter of its own and loads none of some
    modules."""
    code = (
        "import sys\nfrom moebatch.cli import app\n"
        f"app({[*map(str, arguments)]!r}, standalone_mode=False)\n"
        f"sys.exit(' '.join({{*{modules.split()!r}}} & {{*sys.modules}}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class _Server:
    """The process from which commands are forked, as a test sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.command"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[1],
        )

    def end(self) -> None:
        """Waits for its end."""
        self._process.communicate()

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Has a command run to its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(asked)}\n")
        self._process.stdin.flush()
        answered: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answered


@cache
def _server() -> _Server:
    server = _Server()
    atexit.register(server.end)
    return server


def _serve(requests: IO[str], answers: IO[str]) -> None:
    """Ends when the asking process does."""
    for line in requests:
        asked = json.loads(line)
        process = os.fork()
        if process == 0:
            _become(asked)
        _, status = os.waitpid(process, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), file=answers, flush=True)


def _become(asked: dict[str, Any]) -> None:
    """This process is the command from here on."""
    from moebatch.cli import main

    signal.alarm(round(PATIENCE_S))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for place, number in zip(asked["places"], (1, 2), strict=True):
        os.dup2(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv = ["moebatch", *asked["words"]]
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _import_everything() -> None:
    """What commands import when they are called."""
    import transformers.models.auto.tokenization_auto

    import moebatch.calibration.calibrate
    import moebatch.cli
    import moebatch.job.check
    import moebatch.job.run
    import moebatch.report.pictures.drawings
    import moebatch.report.progress
    import moebatch.report.summary

    del transformers, moebatch


if __name__ == "__main__":
    _import_everything()
    _serve(sys.stdin, sys.stdout)
