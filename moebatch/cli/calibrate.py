"""``moebatch calibrate``."""

from dataclasses import replace
from typing import TYPE_CHECKING

from moebatch.calibration.order import CalibrationOrder
from moebatch.cli.parameters import Quiet, with_options
from moebatch.cli.process import let_threads_sleep, saying_what_is_kept
from moebatch.report.console import error_console, logger, show

if TYPE_CHECKING:
    from moebatch.calibration.calibrate import Calibration


@with_options
def calibrate(order: CalibrationOrder, quiet: Quiet = False) -> None:
    """Read a text and keep which experts follow which, so that runs load the right ones early."""
    order.require_consistent()
    let_threads_sleep()
    _execute(replace(order, model=order.model.absolute()), quiet=quiet)


def _execute(order: CalibrationOrder, *, quiet: bool) -> None:
    from moebatch.calibration.calibrate import Calibration
    from moebatch.report.calibration import calibration_view
    from moebatch.report.progress import share_bar

    console = error_console()
    with share_bar("reading", console, quiet=quiet) as advance:
        calibration = Calibration(order, logger(console, quiet=quiet), advance)
        with saying_what_is_kept(lambda: _kept(calibration)):
            summary = calibration.execute()
    if not quiet:
        show(console, calibration_view(summary))


def _kept(calibration: "Calibration") -> str:
    """What an interrupted calibration has kept."""
    if not calibration.num_kept:
        return "nothing is kept yet"
    return f"{calibration.num_kept} tokens are read and kept: the same command continues after them"
