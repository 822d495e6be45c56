"""Options of commands, said once: as fields of the dataclass that the command hands on."""

from collections.abc import Iterable
from dataclasses import dataclass

from moebatch.errors import ConfigError, Fault
from moebatch.units import parse_bytes

DRAM_HELP = "Limit of main memory, such as 4GiB."


@dataclass(frozen=True, slots=True)
class Option:
    """Stands in the annotation of a field, of which `moebatch.cli.parameters` makes an option; a
    field that has neither default nor names is an argument."""

    help: str
    names: tuple[str, ...] = ()
    """None is the name of the field: ``prompt_len`` is ``--prompt-len``."""
    min: float | None = None
    max: float | None = None


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
            for option, message in self.contradictions()
        ]
        if faults:
            raise ConfigError(faults)


def dram_bytes(dram: str | None) -> int | None:
    """The limit of ``--dram`` in bytes. Raises ConfigError."""
    try:
        return None if dram is None else parse_bytes(dram)
    except ValueError as error:
        raise ConfigError([Fault(file="--dram", message=str(error))]) from None
