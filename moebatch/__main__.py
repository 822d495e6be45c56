"""``python -m moebatch`` is the command ``moebatch``."""

import os
import signal
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(130)


def main() -> None:
    """Entry point. While the command line itself is being loaded, Ctrl-C ends it without a word."""
    before = signal.signal(signal.SIGINT, _end)
    from moebatch.cli import main as command

    signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    main()
