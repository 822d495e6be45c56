"""``python -m moebatch`` is the command ``moebatch``."""

import gc
import os
import signal
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(130)


def main() -> None:
    """Entry point. Until a command begins, Ctrl-C ends it without a word: that would be a traceback
    through imports, and some of what is written in C makes another error of it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    # Looking for plugins reads the metadata of every package that is installed.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    gc.disable()  # what modules make lasts, and need not be looked through for garbage
    from moebatch.cli import main as command

    gc.freeze()
    gc.enable()
    command()


if __name__ == "__main__":
    main()
