"""What a calibration is asked for."""

from dataclasses import dataclass
from pathlib import Path

from moebatch.predict.learnt_files import TABLE
from moebatch.spec.policy import PredictorName


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationOrder:
    """What is to be read and what is to be written."""

    model: Path
    text: Path
    """Plain text, or what a job reads its prompts from."""
    path_length: int = 1
    num_tokens: int = 65536
    """So much of the text is read at most."""
    dram_bytes: int | None = None
    """Most main memory; None is all that is free."""
    output: Path | None = None
    """The table; None puts it beside the model."""
    trace: Path | None = None
    """Where all routing is written to, if anywhere."""
    predictors: frozenset[PredictorName] = frozenset()
    """Those that learn beside the table; each is kept in a file of its own beside that."""
    gating_loss: float | None = None
    """By how much perplexity may grow through adaptive gating, as a share; None learns nothing of
    gating."""

    activation_level: int | None = None
    """Layers with experts ahead for which gates are to learn to choose; None if they are not."""

    @property
    def table(self) -> Path:
        """Where the table goes."""
        return self.output or TABLE.path(self.model)
