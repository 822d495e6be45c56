"""Options of commands, said once: as fields of the dataclass that the command hands on."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin

from moebatch.errors import ConfigError, Fault
from moebatch.quoting import not_one_of
from moebatch.units import parse_bytes

DRAM_HELP = "Limit of main memory, such as 4GiB."
WEIGHTS = "weights"
"""What ``--what-if`` calls the format of experts, which is no figure of a machine."""


@dataclass(frozen=True, slots=True)
class Option:
    """Stands in the annotation of a field, of which `moebatch.cli.parameters` makes an option; a
    field that has neither default nor names is an argument."""

    help: str
    names: tuple[str, ...] = ()
    """None is the name of the field: ``prompt_len`` is ``--prompt-len``."""
    min: float | None = None
    max: float | None = None

    def names_of(self, field: str) -> tuple[str, ...]:
        """What is typed for the field of that name."""
        return self.names or (f"--{field.replace('_', '-')}",)


def choices(annotation: Any) -> tuple[str, ...]:
    """The values of a Literal, or of one or None; empty for a field of other values."""
    literals = (of for of in (annotation, *get_args(annotation)) if get_origin(of) is Literal)
    return get_args(next(literals, None))


class Options:
    """A dataclass with options of a command."""

    __slots__ = ()
    command: str
    """What was typed."""

    def contradictions(self) -> Iterable[tuple[str, str]]:
        """Options that contradict each other, that are missing, or whose value cannot be used,
        each with what is wrong."""
        return ()

    def require_consistent(self) -> None:
        """Raises ConfigError with all of them."""
        faults = [
            Fault(file=self.command, where=option, message=message)
            for option, message in (*self._unknown_choices(), *self.contradictions())
        ]
        if faults:
            raise ConfigError(faults)

    def _unknown_choices(self) -> Iterator[tuple[str, str]]:
        for field in fields(self):  # type: ignore[arg-type]  # a subclass is a dataclass
            if get_origin(field.type) is Annotated:
                of, option = get_args(field.type)
                allowed, value = choices(of), getattr(self, field.name)
                if allowed and value not in (None, *allowed):
                    yield option.names_of(field.name)[-1], not_one_of(allowed, value)


class LimitedOptions(Options):
    """Those of a command that has ``--dram``."""

    __slots__ = ()
    dram: str | None

    @property
    def dram_bytes(self) -> int | None:
        """Most main memory; None is all that is free."""
        return None if self.dram is None else parse_bytes(self.dram)

    def dram_faults(self) -> Iterator[tuple[str, str]]:
        """What is wrong with ``--dram``, as `contradictions` have it."""
        try:
            _ = self.dram_bytes
        except ValueError as error:
            yield "--dram", str(error)
