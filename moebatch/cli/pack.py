"""``moebatch pack``."""

from dataclasses import replace
from functools import partial

from moebatch.cli.parameters import Quiet, with_options
from moebatch.cli.process import carried_out
from moebatch.packing.order import PackOrder
from moebatch.report.console import error_console, show


@with_options
def pack(order: PackOrder, quiet: Quiet = False) -> None:
    """Write a smaller checkpoint, its experts in 4 or 8 bits, which other programs read as well."""
    order.require_consistent()
    from moebatch.packing.pack import Pack
    from moebatch.report.packing import pack_view

    order = replace(order, model=order.model.absolute())
    summary = carried_out(
        partial(Pack, order), doing="packing", kept="files are written", quiet=quiet
    )
    if not quiet:
        show(error_console(), pack_view(summary))
