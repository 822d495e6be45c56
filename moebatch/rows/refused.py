"""How the checks of a row say no."""

from moebatch.spec.request import RowError


class RowRefused(Exception):
    """A row cannot be computed as it is. Never leaves this room: it becomes a row of errors."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = RowError(status=400, code=code, message=message, param=param)


def wrong(param: str, message: str) -> RowRefused:
    """A parameter has a value that is not allowed; the message continues its name."""
    return RowRefused(f"{param} {message}", code="invalid_value", param=param)


def missing(param: str, message: str) -> RowRefused:
    """A parameter is needed and not there; the message continues its name."""
    return RowRefused(f"{param} {message}", code="missing_required_parameter", param=param)


def unsupported(param: str, message: str) -> RowRefused:
    """A parameter asks for what is not implemented; the message continues its name."""
    return RowRefused(f"{param} {message}", code="unsupported_parameter", param=param)
