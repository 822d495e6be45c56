"""What a pack is asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from moebatch.spec.model.precision import GROUPS, Precision
from moebatch.spec.option import DRAM_HELP, LimitedOptions, Option


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOrder(LimitedOptions):
    """What is to be written."""

    model: Annotated[Path, Option("Model folder.")]
    to: Annotated[Precision | None, Option("What experts are written as.")] = None
    output: Annotated[
        Path | None,
        Option("The new model folder; default: beside MODEL, as MODEL-TO.", ("-o", "--output")),
    ] = None
    group: Annotated[
        int | None, Option("Weights that share a scale, for int4: 64 or 32; default: what fits.")
    ] = None
    bits: Annotated[
        float | None,
        Option("Mean bits of a code, for int4, such as 4.5: experts that matter more get 8."),
    ] = None
    dram: Annotated[str | None, Option(DRAM_HELP)] = None
    text: Annotated[
        Path | None, Option("Also measure perplexity on it, before and after: as calibrate.")
    ] = None
    num_tokens: Annotated[
        int, Option("Tokens of the text that are read.", ("--tokens",), min=2, max=2**24)
    ] = 65536

    command: str = "moebatch pack"

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.to is None:
            yield "--to", "is needed: int4, int8 or fp8"
        if self.group is not None and (self.to != "int4" or self.group not in GROUPS):
            yield "--group", "is 64 or 32, and for --to int4 only"
        if self.bits is not None and (self.to != "int4" or not 4 < self.bits < 8):
            yield "--bits", "is between 4 and 8, such as 4.5, and for --to int4 only"
        yield from self.dram_faults()

    @property
    def folder(self) -> Path:
        """Where the new model goes."""
        name = self.to if self.bits is None else f"{self.bits:g}bit"
        # The folder above, and this one, have no name by which they are called here.
        model = self.model.resolve() if self.model.name in ("", "..") else self.model
        return (self.output or model.with_name(f"{model.name}-{name}")).absolute()
