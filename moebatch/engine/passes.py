"""What takes a pass through the model: the overlapped pipeline, or the plain sweep."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from moebatch.engine.batcher import Slice
from moebatch.engine.logits import LogitsBlock


class Passes(Protocol):
    """Takes slices of sequences through all layers."""

    @property
    def num_layers(self) -> int:
        """Layers of a walk."""

    def run(
        self, slices: Sequence[Slice], layer_begins: Callable[[int], None]
    ) -> Iterator[LogitsBlock]:
        """Yields the logits from which next tokens come, block by block.

        All slices are counted as cached when the first block is yielded. `layer_begins` is called
        with every layer.
        """

    def give_up(self) -> None:
        """After a pass that failed: the next one may begin at the first layer again."""

    @property
    def num_ended(self) -> int:
        """Tasks that have ended so far; grows while anything moves."""

    def doing(self) -> str:
        """What is being done, in words."""

    def interrupt(self, error: BaseException) -> None:
        """Ends the pass in work with `error`, as soon as may be; any thread may call it."""

    def close(self) -> None:
        """Ends what runs beside it."""
