"""All schedules by name, those of the user's own files included."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, GeneratorType
from typing import Any

from moebatch.errors import ConfigError, Fault, Interrupted, MoebatchError
from moebatch.quoting import named_reason, shown
from moebatch.schedule.cgopipe import cgopipe, fastdecode
from moebatch.schedule.definition import NamedSchedule, Traits
from moebatch.schedule.drivers import driver
from moebatch.schedule.flexgen import flexgen, flexgen_c
from moebatch.schedule.klotski import hot, klotski, multi, simple
from moebatch.schedule.own import OutOfOrder, checked
from moebatch.schedule.pregated import ondemand, prefetch_all, pregated
from moebatch.schedule.promoe import promoe, promoe_base, promoe_preempt, promoe_prefetch
from moebatch.schedule.request import CannotGoOn, Schedule
from moebatch.schedule.setup import Setup
from moebatch.spec.policy.policy import OpenPolicy, Policy

SCHEDULES: Mapping[str, NamedSchedule] = {
    one.name: one
    for one in (
        *(klotski, hot, multi, simple),
        *(cgopipe, fastdecode, flexgen, flexgen_c),
        *(pregated, ondemand, prefetch_all),
        *(promoe, promoe_preempt, promoe_prefetch, promoe_base),
    )
}

PLANNED = (cgopipe, klotski)
"""Those among which the planner's own search chooses, where a user names none."""
PRE_GATED = pregated
"""That for which pre-gates are made."""
_OWN = "moebatch_schedule_"
"""What names of modules begin with that are a user's files."""


@cache
def find_schedule(name: str) -> NamedSchedule:
    """The schedule of that name, or of a file: ``my_schedule.py:mine``.

    Raises ConfigError for a name that does not exist, and for a file that has no such schedule.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        there = ", ".join(SCHEDULES)
        raise _fault(
            name,
            f"no schedule is named {shown(name)}; there are {there}, and your own as file.py:name",
        )
    module = _module(Path(path), name)
    with _blaming_file(Path(path), name):
        found = getattr(module, function, None)
    if not isinstance(found, NamedSchedule):
        raise _fault(
            name,
            f"{shown(path)} has no schedule {shown(function)}; it takes a function with the "
            "decorator moebatch.schedule.definition.schedule",
        )
    return replace(found, begin=lambda setup: _begin(found, setup, Path(path), name))


def unknown_schedule(name: str) -> tuple[str, ...]:
    """What is wrong with the name of a schedule; nothing if there is one."""
    try:
        find_schedule(name)
    except ConfigError as error:
        return tuple(fault.message for fault in error.faults)
    return ()


def traits_of(policy: Policy | OpenPolicy) -> Traits:
    """What the schedule of a policy is like."""
    return find_schedule(policy.schedule).traits


def schedule_faults(policy: OpenPolicy) -> Iterator[tuple[str, str]]:
    """Field and message of all that a policy and its schedule contradict each other in."""
    name = policy.schedule
    unknown = unknown_schedule(name)
    if unknown:
        yield from (("schedule", message) for message in unknown)
        return
    traits = traits_of(policy)
    if policy.cache != "static" and traits.is_paged:
        yield "cache", f"must be static with schedule: {name}, which brings whole layers"
    if traits.attention is None or traits.moves != "block" or not policy.ffn_on_gpu:
        return  # without a GPU everything attends on the CPU
    wants_gpu = traits.attention == "gpu"
    if policy.attention_on_gpu != wants_gpu:
        there = "GPU" if policy.attention_on_gpu else "CPU"
        other = _other_attention(traits)
        yield (
            "schedule",
            f"{name} needs attention_on_gpu: {str(wants_gpu).lower()}; on the {there} it is "
            f"{other}",
        )


def _other_attention(traits: Traits) -> str:
    """The schedule that is like this one but for where it attends."""
    return next(
        one.name
        for one in SCHEDULES.values()
        if one.traits.moves == traits.moves and one.traits.attention != traits.attention
    )


def _module(path: Path, name: str) -> Any:
    """A user's file, run as a module."""
    known_as = f"{_OWN}{path.absolute()}".replace(".", "_")  # dots would be packages
    found = spec_from_file_location(known_as, path)
    if found is None or found.loader is None or not path.is_file():
        raise _fault(name, f"there is no file {shown(str(path))}")
    module = module_from_spec(found)
    sys.modules[known_as] = module  # dataclasses and type hints look up names there
    with _blaming_file(path, name):
        found.loader.exec_module(module)
    return module


def _begin(own: NamedSchedule, setup: Setup, path: Path, name: str) -> Schedule:
    """The same schedule; what it yields out of order, and what a line of the user's file raises, is
    a fault of that file."""
    with _blaming_file(path, name):
        begun = own(setup)
        try:
            yield from checked(begun, setup, own.traits)
        except (OutOfOrder, CannotGoOn) as error:
            line = _line_now(begun, path) or _line_of(error, path)
            raise _fault(name, f"{shown(str(path))}{line}: {error}") from error
        finally:
            with suppress(Exception):  # it has been of use already, or something else is wrong
                begun.close()


@contextmanager
def _blaming_file(path: Path, name: str) -> Iterator[None]:
    """While the block runs, whatever a user's file raises is a fault of that file, and Ctrl-C names
    the line that it has found at work. What comes through the file from lanes and the driver stays
    what it is."""
    try:
        yield
    except BaseException as error:
        line, is_ctrl_c = _line_of(error, path), type(error) is KeyboardInterrupt
        said = f"{shown(str(path))}{line}: {named_reason(error)}"
        if is_ctrl_c and line:
            raise Interrupted(f"schedule: {shown(name)}: {said}, as by Ctrl-C") from None
        if _comes_from_elsewhere(error, line):
            raise
        raise _fault(name, said) from error


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
        if str(each.f_globals.get("__name__")).startswith(_OWN):
            return True
    return False


def _line_now(begun: Schedule | None, path: Path) -> str:
    """Where in the user's file a schedule has stopped, if it has."""
    line, own = "", str(path.absolute())
    at: object = begun
    while isinstance(at, GeneratorType):
        if at.gi_frame is not None and at.gi_code.co_filename == own:
            line = f", line {at.gi_frame.f_lineno}"
        at = at.gi_yieldfrom
    return line


def _line_of(error: BaseException, path: Path) -> str:
    """Where in the user's file an error was raised, or which line cannot be read."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}" if error.lineno else ""
    if isinstance(error.__cause__, StopIteration):  # Python makes a RuntimeError of it
        error = error.__cause__
    frames = walk_tb(error.__traceback__)
    own = str(path.absolute())
    lines = [line for frame, line in frames if frame.f_code.co_filename == own]
    return f", line {lines[-1]}" if lines else ""


def _fault(name: str, message: str) -> ConfigError:
    return ConfigError([Fault(file="schedule", where=shown(name), message=message)])
