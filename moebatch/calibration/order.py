"""What a calibration is asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from moebatch.quoting import not_one_of
from moebatch.spec.option import DRAM_HELP, LimitedOptions, Option

if TYPE_CHECKING:  # `moebatch --help` need not load it
    from moebatch.spec.policy.policy import PredictorName

_USUAL_LOSS, _USUAL_LEVEL = 1.0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationOrder(LimitedOptions):
    """What is to be read and what is to be written."""

    model: Annotated[Path, Option("Model: folder or GGUF file.")]
    text: Annotated[
        Path | None, Option("Text like that of your jobs: .txt, or the input of one.")
    ] = None
    path_length: Annotated[int, Option("Layers back that the table counts.", min=1, max=8)] = 1
    num_tokens: Annotated[
        int, Option("Tokens of the text that are read.", ("--tokens",), min=1, max=2**24)
    ] = 65536
    output: Annotated[
        Path | None, Option("Write to this file, not beside the model.", ("-o", "--output"))
    ] = None
    trace: Annotated[Path | None, Option("Write what all tokens chose to this file.")] = None
    predictor: Annotated[
        tuple[str, ...],
        Option(
            "Predictors to train beside the table: token, next-gate, learned or all; repeatable."
        ),
    ] = ()
    gating: Annotated[
        Literal["adaptive"] | None, Option("Also learn when one expert is enough.")
    ] = None
    loss: Annotated[
        float, Option("Highest loss of perplexity from gating, in percent.", min=0.0, max=100.0)
    ] = _USUAL_LOSS
    pregate: Annotated[bool, Option("Train gates to choose for a later layer (minutes).")] = False
    level: Annotated[int, Option("Layers with experts ahead, for --pregate.", min=1, max=3)] = (
        _USUAL_LEVEL
    )
    dram: Annotated[str | None, Option(DRAM_HELP)] = None

    command: str = "moebatch calibrate"

    def contradictions(self) -> Iterator[tuple[str, str]]:
        if self.text is None:
            yield (
                "--text",
                ("is needed: a text like those of your jobs, as .txt, or the input file of a job"),
            )
        known = (*_learning(), "all")
        for name in self.predictor:
            if name not in known:
                yield "--predictor", not_one_of(known, name)
        if self.loss != _USUAL_LOSS and self.gating is None:
            yield "--loss", "is for --gating adaptive only"
        if self.level != _USUAL_LEVEL and not self.pregate:
            yield "--level", "is for --pregate only"
        yield from self.dram_faults()

    @property
    def source(self) -> Path:
        """Plain text, or what a job reads its prompts from."""
        assert self.text is not None, "checked before"
        return self.text

    @property
    def predictors(self) -> "frozenset[PredictorName]":
        """Those that learn beside the table; each is kept in a file of its own beside that."""
        wanted = _learning() if "all" in self.predictor else self.predictor
        return frozenset(name for name in _learning() if name in wanted) - {"correlation"}

    @property
    def gating_loss(self) -> float | None:
        """By how much perplexity may grow through adaptive gating, as a share; None learns nothing
        of gating."""
        return None if self.gating is None else self.loss / 100

    @property
    def activation_level(self) -> int | None:
        """Layers with experts ahead for which gates are to learn to choose; None if they are
        not."""
        return self.level if self.pregate else None

    @property
    def table(self) -> Path:
        """Where the table goes."""
        from moebatch.predict.learnt_files import TABLE
        from moebatch.spec.job import ModelSection

        return self.output or TABLE.path(ModelSection(path=self.model).folder)


def _learning() -> "list[PredictorName]":
    from moebatch.spec.policy.policy import PREDICTORS

    return [name for name in PREDICTORS if name != "none"]
