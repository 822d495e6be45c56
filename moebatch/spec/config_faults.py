"""What is wrong with a ``config.json``."""

from collections.abc import Sequence
from dataclasses import dataclass

from moebatch.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """What is wrong with one figure, or between two."""

    key: str
    """Way to the figure, such as ``ffn_config.moe_top_k``."""
    message: str
    names_key: bool = False
    """The message needs no key in front."""

    def __str__(self) -> str:
        return self.message if self.names_key else f"{self.key}: {self.message}"


class FaultyConfig(CheckpointError):
    """A configuration that describes no model, or none that is supported."""

    def __init__(self, where: str, faults: Sequence[ConfigFault]) -> None:
        super().__init__("\n".join(f"{where}: {fault}" for fault in faults))
        self.faults = tuple(faults)
