"""``python -m moebatch`` is the command ``moebatch``."""

from moebatch.cli import main

if __name__ == "__main__":
    main()
