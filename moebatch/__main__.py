"""``python -m moebatch`` is the command ``moebatch``."""

import os
import signal
from types import FrameType

from moebatch.garbage import importing


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(130)


def main() -> None:
    """Entry point. Until a command begins, Ctrl-C ends it without a word: that would be a traceback
    through imports, and some of what is written in C makes another error of it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    # Looking for plugins reads the metadata of every package that is installed.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    with importing():
        from moebatch.cli import main as command
        from moebatch.cli.process import ignore_stops

    try:
        command()
    finally:
        ignore_stops()


if __name__ == "__main__":
    main()
