"""How much of something large has been read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextmanager
def counting_bytes(console: Console) -> Iterator[Callable[[int], None]]:
    """Gives what is to be told how many more bytes have been read; silent without a terminal."""
    columns = TextColumn("reading weights"), DownloadColumn(binary_units=True)
    bar = Progress(
        *columns,
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("reading", total=None, visible=False)

        def told(num_bytes: int) -> None:
            bar.update(task, advance=num_bytes, visible=True)

        yield told
