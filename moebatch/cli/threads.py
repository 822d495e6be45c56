"""What has to be said about threads before torch is loaded."""

import os


def let_threads_sleep() -> None:
    """Torch's threads should sleep, not spin, while they have nothing to do.

    Spinning ones keep readers, the progress display and other processes off the cores,
    which then makes every parallel operation wait for a thread that is not running.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
