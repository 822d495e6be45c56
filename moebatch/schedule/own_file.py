"""A user's file with a schedule: run as a module, and to blame for what its lines do."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, GeneratorType
from typing import Any

from moebatch.errors import ConfigError, Interrupted, MoebatchError
from moebatch.quoting import named_reason, shown
from moebatch.schedule.definition import NamedSchedule
from moebatch.schedule.drivers import driver
from moebatch.schedule.own import OutOfOrder, checked
from moebatch.schedule.request import CannotGoOn, Schedule
from moebatch.schedule.setup import Setup

_PREFIX = "moebatch_schedule_"
"""What names of modules begin with that are a user's files."""


def is_own(name: str) -> bool:
    """Whether a schedule is named like one of a user's file: ``my_schedule.py:mine``."""
    path, _, _ = name.rpartition(":")
    return path.endswith(".py")


@dataclass(frozen=True, slots=True)
class OwnFile:
    """The file of a schedule of the user's own."""

    name: str
    """Of the schedule, as the user typed it."""

    def schedule(self) -> NamedSchedule:
        """What it yields out of order, and what a line of the file raises, is a fault of the file.

        Raises ConfigError where the file has no such schedule.
        """
        function, module = self.name.rpartition(":")[2], self._module()
        with self._blamed():
            found = getattr(module, function, None)
        if not isinstance(found, NamedSchedule):
            raise self._fault(f"{self} has no schedule {shown(function)}; {_instead(module)}")
        return replace(found, begin=lambda setup: self._begin(found, setup))

    def __str__(self) -> str:
        return shown(str(self._path))

    @property
    def _path(self) -> Path:
        return Path(self.name.rpartition(":")[0])

    def _module(self) -> Any:
        """The file, run as a module."""
        known_as = f"{_PREFIX}{self._path.absolute()}".replace(".", "_")  # dots would be packages
        found = spec_from_file_location(known_as, self._path)
        if found is None or found.loader is None or not self._path.is_file():
            raise self._fault(f"there is no file {self}")
        module = module_from_spec(found)
        sys.modules[known_as] = module  # dataclasses and type hints look up names there
        with self._blamed():
            found.loader.exec_module(module)
        return module

    def _begin(self, own: NamedSchedule, setup: Setup) -> Schedule:
        with self._blamed():
            begun = own(setup)
            try:
                yield from checked(begun, setup, own.traits)
            except (OutOfOrder, CannotGoOn) as error:
                line = self._line_now(begun) or self._line_of(error)
                raise self._fault(f"{self}{line}: {error}") from error
            finally:
                with suppress(Exception):  # it has been of use already, or something else is wrong
                    begun.close()

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """While the block runs, whatever the file raises is a fault of it, and Ctrl-C names the
        line that it has found at work. What comes through the file from lanes and the driver stays
        what it is."""
        try:
            yield
        except BaseException as error:
            line, is_ctrl_c = self._line_of(error), type(error) is KeyboardInterrupt
            said = f"{self}{line}: {named_reason(error)}"
            if is_ctrl_c and line:
                message = f"schedule: {shown(self.name)}: {said}, as by Ctrl-C"
                raise Interrupted(message) from None
            if _comes_from_elsewhere(error, line):
                raise
            raise self._fault(said) from error

    def _line_now(self, begun: Schedule) -> str:
        """Where in the file a schedule has stopped, if it has."""
        line, own = "", str(self._path.absolute())
        at: object = begun
        while isinstance(at, GeneratorType):
            if at.gi_frame is not None and at.gi_code.co_filename == own:
                line = f", line {at.gi_frame.f_lineno}"
            at = at.gi_yieldfrom
        return line

    def _line_of(self, error: BaseException) -> str:
        """Where in the file an error was raised, or which line cannot be read."""
        if isinstance(error, SyntaxError):
            return f", line {error.lineno}" if error.lineno else ""
        if isinstance(error.__cause__, StopIteration):  # Python makes a RuntimeError of it
            error = error.__cause__
        frames = walk_tb(error.__traceback__)
        own = str(self._path.absolute())
        lines = [line for frame, line in frames if frame.f_code.co_filename == own]
        return f", line {lines[-1]}" if lines else ""

    def _fault(self, message: str) -> ConfigError:
        return ConfigError.at("schedule", message, where=shown(self.name))


def _instead(module: Any) -> str:
    """What a file has where it has no schedule of a name."""
    own = [name for name, each in vars(module).items() if isinstance(each, NamedSchedule)]
    if own:
        return f"it has {', '.join(own)}"
    return "it takes a function with the decorator moebatch.schedule.definition.schedule"


def _comes_from_elsewhere(error: BaseException, line: str) -> bool:
    """Whether no line of a user's file has raised it: the schedule is closed, a run is asked to
    stop, or the schedule only waited for something."""
    if isinstance(error, MoebatchError | KeyboardInterrupt):
        return True
    if isinstance(error, GeneratorExit) and not line:
        return True
    frames = walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename == driver.__file__ for frame, _ in frames)


def own_is_at_work(frame: FrameType | None) -> bool:
    """Whether a line of a user's file is at work in that frame or calls it, and no lane or driver
    works for it: nothing there is half done but what the file does."""
    frames = () if frame is None else (each for each, _ in walk_stack(frame))
    for each in frames:
        if each.f_code.co_filename == driver.__file__:
            return False
        if str(each.f_globals.get("__name__")).startswith(_PREFIX):
            return True
    return False
