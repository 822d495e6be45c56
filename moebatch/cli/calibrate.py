"""``moebatch calibrate``."""

from dataclasses import replace
from functools import partial

from moebatch.calibration.order import CalibrationOrder
from moebatch.cli.parameters import Quiet, with_options
from moebatch.cli.process import carried_out, let_threads_sleep
from moebatch.report.console import error_console, show


@with_options
def calibrate(order: CalibrationOrder, quiet: Quiet = False) -> None:
    """Read a text and keep which experts follow which, so that runs load the right ones early."""
    order.require_consistent()
    let_threads_sleep()
    _execute(replace(order, model=order.model.absolute()), quiet=quiet)


def _execute(order: CalibrationOrder, *, quiet: bool) -> None:
    from moebatch.calibration.calibrate import Calibration
    from moebatch.report.calibration import calibration_view

    summary = carried_out(
        partial(Calibration, order), doing="reading", kept="tokens are read", quiet=quiet
    )
    if not quiet:
        show(error_console(), calibration_view(summary))
