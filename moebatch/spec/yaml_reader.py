"""Takes the plain data of a YAML file apart and collects all that is wrong with it."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from moebatch.errors import ConfigError, Fault
from moebatch.quoting import shown
from moebatch.spec.yaml_file import Place, YamlFile, dotted

Value = TypeVar("Value")


class YamlReader:
    """Base of readers of files of one kind: what cannot be read is a fault and left out."""

    def __init__(self, file: YamlFile) -> None:
        self._file = file
        self._faults = list(file.faults)

    def finish(self) -> None:
        """Raises ConfigError with all faults that were found, if there are any."""
        if self._faults:
            # Asking for a value twice finds its fault twice.
            faults = dict.fromkeys(self._faults)
            raise ConfigError(sorted(faults, key=lambda fault: fault.line or 0))

    def _mapping(self, place: Place, value: object, allowed: tuple[str, ...]) -> dict[str, object]:
        if not isinstance(value, Mapping):
            message = f"must be a mapping with keys of its own ({', '.join(allowed)})"
            self._fault(place, f"{message}, got {shown(value)}")
            return {}
        for key in value:
            if key not in allowed:
                self._fault((*place, key), self._unknown(place, key, allowed))
        return {key: value[key] for key in allowed if key in value}

    def _text(self, place: Place, value: object) -> str:
        """A text in one line."""
        if isinstance(value, str):
            text = " ".join(value.split())
            # A file may come from anywhere, and its texts go to a terminal.
            if text and text.isprintable():
                return text
        self._fault(place, f"must be a text, got {shown(value)}")
        return "?"

    def _checked(
        self, place: Place, value: object, check: Callable[[object], Value]
    ) -> Value | None:
        """What `check` makes of a value; it raises ValueError with what is allowed."""
        try:
            return check(value)
        except ValueError as error:
            self._fault(place, str(error))
            return None

    def _fault(self, place: Place, message: str) -> None:
        line = self._file.line_of(place)
        fault = Fault(file=str(self._file.path), line=line, where=dotted(place), message=message)
        self._faults.append(fault)

    def _unknown(self, place: Place, key: str, allowed: tuple[str, ...]) -> str:
        near = get_close_matches(key, allowed, n=1)
        if near:
            return f"unknown key; did you mean {dotted((*place, *near))}?"
        return f"unknown key; allowed are {', '.join(allowed)}"
