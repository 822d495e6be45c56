"""Parameters of commands: fields of dataclasses, and what several commands have."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.models import ParameterInfo

from moebatch.errors import ConfigError
from moebatch.spec.files.text_file import is_no_regular_file, is_same_file
from moebatch.spec.option import Option, choices


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer takes it: of each parameter that is a dataclass, the fields that say what
    `Option` they are. The command is given such a dataclass with what was typed."""
    shown: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        own = [parameter.replace(kind=parameter.KEYWORD_ONLY)]
        group: Any = parameter.annotation
        if is_dataclass(group):
            own = list(_options(group))
            groups[parameter.name] = group, [one.name for one in own]
        shown += own

    @wraps(command)
    def typed(**given: Any) -> None:
        for name, (group, options) in groups.items():
            given[name] = group(**{option: _plain(given.pop(option)) for option in options})
        command(**given)

    typed.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return typed


def _options(group: Any) -> Iterator[inspect.Parameter]:
    for field in fields(group):
        if get_origin(field.type) is not Annotated:
            continue
        of, *marks = get_args(field.type)
        option = next(mark for mark in marks if isinstance(mark, Option | ParameterInfo))
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        allowed = choices(of)
        if isinstance(option, Option):
            has_default = field.default is not MISSING
            option = _typer_parameter(field.name, option, allowed, has_default=has_default)
        if allowed:  # what is typed is checked with all other options
            of = str | None
        if get_origin(of) is tuple:
            of = list[get_args(of)[0]]  # type: ignore[misc]
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[of, option],
        )


def _typer_parameter(
    name: str, option: Option, allowed: Sequence[str], *, has_default: bool
) -> Any:
    bounds: dict[str, Any] = {"help": option.help, "min": option.min, "max": option.max}
    if not (has_default or option.names):
        return typer.Argument(metavar=name.upper(), **bounds)
    metavar = f"<{'|'.join(allowed)}>" if allowed else None
    return typer.Option(*option.names_of(name), metavar=metavar, **bounds)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# --- what several commands have -----------------------------------------------------------------

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML).")]
PlannedJob = Annotated[
    Path | None, typer.Argument(metavar="JOB", help="Job file; or --model and lengths.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing unless something is wrong.")]


def either(endings: Sequence[str]) -> str:
    """``.svg, .png or .pdf``."""
    *others, last = endings
    return f"{', '.join(others)} or {last}"


def named(*endings: str) -> Callable[[Path | None], Path | None]:
    """A check of the suffix of a file, which says what is written into it, before anything runs.
    Pipes and devices may have any name."""

    def check(path: Path | None) -> Path | None:
        is_file = path is not None and (path.is_file() or not path.exists())
        if path is not None and is_file and not path.name.lower().endswith(endings):
            raise typer.BadParameter(f"must end in {either(endings)}, got {str(path)!r}")
        return path

    return check


def require_places(
    command: str, written: Mapping[str, Path | None], read: Mapping[str, str | Path | None]
) -> None:
    """Makes the folders of what a command writes. Files by the options that name them; what is read
    may also be a name of no file.

    Raises ConfigError where it would write over a file that it reads, or that it writes itself, and
    StorageError where it cannot write.
    """
    from moebatch.measure.saved import require_writable_file

    _require_apart(command, written, read)
    for path in written.values():
        if path is not None:
            require_writable_file(path)


def _require_apart(
    command: str, written: Mapping[str, Path | None], read: Mapping[str, str | Path | None]
) -> None:
    taken = {option: Path(path) for option, path in read.items() if path and Path(path).is_file()}
    for option, path in written.items():
        if path is None or is_no_regular_file(path):
            continue
        same = next((other for other, theirs in taken.items() if is_same_file(path, theirs)), None)
        if same is not None:
            message = f"is the same as {same}; choose another"
            raise ConfigError.at(command, message, where=option)
        taken[option] = path


PICTURES = (".svg", ".html", ".png", ".pdf")
_TRACES = (".json", ".json.gz")


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawings:
    """Files that timelines are drawn into."""

    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            callback=named(*_TRACES),
            help=f"Write a Chrome trace ({either(_TRACES)}) of the first passes.",
        ),
    ] = None
    gantt: Annotated[
        Path | None,
        typer.Option(
            "--gantt",
            callback=named(*PICTURES),
            help=f"Draw the lanes into this file: {either(PICTURES)}.",
        ),
    ] = None

    @property
    def paths(self) -> dict[str, Path]:
        """By the options that name them."""
        named = {"--trace": self.trace, "--gantt": self.gantt}
        return {option: path for option, path in named.items() if path is not None}
