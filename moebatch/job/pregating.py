"""Pre-gates learn from a text, and are held against gates that learn where they are."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebatch.engine.pregate_file import PREGATES, save_pregates
from moebatch.errors import ConfigError, DoesNotFit, Fault, InputError
from moebatch.job.calibration_order import CalibrationOrder
from moebatch.plan.machine import detect_machine
from moebatch.predict.owner import ModelOwner
from moebatch.spec.shape import ModelShape
from moebatch.store.memory import resident_bytes
from moebatch.training.gated_model import GatedModel, load_frozen
from moebatch.training.memory import training_bytes
from moebatch.training.recipe import Recipe, Sample, learn, perplexity
from moebatch.units import format_bytes

USUAL = Recipe()
HELD_OUT_SHARE = 0.1
MOST_HELD_OUT = 512
"""Sequences on which perplexity is measured at most."""
Advance = Callable[[float], None]


def require_possible(order: CalibrationOrder, shape: ModelShape, *, longest: int) -> None:
    """Raises ConfigError and DoesNotFit, before anything is read, if gates are to learn what they
    cannot, from sequences of at most `longest` tokens."""
    if order.activation_level is None:
        return
    if order.activation_level >= len(shape.moe_layers):
        message = f"must be less than {len(shape.moe_layers)}, the layers that have experts"
        raise ConfigError([Fault(file="moebatch calibrate", where="--level", message=message)])
    dram_bytes = order.dram_bytes or detect_machine().dram_bytes
    held = resident_bytes()
    needed = training_bytes(shape, min(longest, shape.max_positions))
    if held + needed > dram_bytes:
        raise DoesNotFit(
            f"dram: for gates to learn, the whole model has to be in memory, in float32 and with "
            f"gradients. That needs {format_bytes(held + needed)}, there are "
            f"{format_bytes(dram_bytes)}; raise --dram, leave --pregate out, or let them learn on "
            "a larger machine and copy the file"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PreGateLesson:
    """What pre-gates have learnt, and what they are worth."""

    file: Path
    activation_level: int
    num_tokens: int
    """That they have learnt from, those seen again included."""
    num_held_out: int
    """Tokens that perplexity is about."""
    perplexity: Mapping[str, float]
    """Of what was held out, by what chooses experts."""
    learn_s: float
    """Of gates that stay and those that move."""


@dataclass(frozen=True, slots=True)
class _Learnt:
    """Gates that have learnt; exp of the mean loss before and after."""

    before: float
    after: float
    num_tokens: int
    gates: GatedModel


@dataclass(frozen=True, kw_only=True, slots=True)
class PreGateTeacher:
    """A model whose gates are to be moved, and a text."""

    owner: ModelOwner
    known: Sequence[Sample]
    unseen: Sequence[Sample]
    """Held out."""
    activation_level: int
    recipe: Recipe

    @classmethod
    def of(
        cls, samples: Sequence[Sample], owner: ModelOwner, activation_level: int
    ) -> "PreGateTeacher":
        """One who holds the last tenth out. Raises InputError where that is nothing."""
        num_unseen = round(len(samples) * HELD_OUT_SHARE)
        if not num_unseen:
            message = f"has {len(samples)} sequences, too few to hold a tenth out; give 10"
            raise InputError([Fault(file="--text", message=message)])
        return cls(
            owner=owner,
            known=samples[:-num_unseen],
            unseen=samples[-num_unseen:][:MOST_HELD_OUT],
            activation_level=activation_level,
            recipe=USUAL,
        )

    @property
    def description(self) -> str:
        """What is going to happen."""
        steps = f"{self.recipe.num_steps} steps of {self.recipe.batch_tokens} tokens"
        wanted = sum(sample.num_wanted for sample in self.known)
        return (
            f"gates learn twice, where they are and moved, {steps} each, from {len(self.known)} "
            f"sequences of which they foretell {wanted} tokens"
        )

    def teach(self, folder: Path, advance: Advance) -> PreGateLesson:
        """Trains gates that stay and gates that move alike, and writes the latter into `folder`;
        `advance` gets the share that is done. Raises StorageError."""
        begun = time.perf_counter()
        model = load_frozen(self.owner.folder)
        staying = self._learn(model, 0, lambda share: advance(share / 2))
        moved = self._learn(model, self.activation_level, lambda share: advance((1 + share) / 2))
        found = {
            "the checkpoint's gates": staying.before,
            "gates, trained": staying.after,
            "pre-gates, moved only": moved.before,
            "pre-gates, trained": moved.after,
        }
        path = folder / PREGATES.file_name
        save_pregates(
            path, moved.gates.pregates(), self.owner, num_tokens=moved.num_tokens, perplexity=found
        )
        return PreGateLesson(
            file=path,
            activation_level=self.activation_level,
            num_tokens=moved.num_tokens,
            num_held_out=sum(sample.num_wanted for sample in self.unseen),
            perplexity=found,
            learn_s=time.perf_counter() - begun,
        )

    def _learn(self, model: Any, activation_level: int, advance: Advance) -> _Learnt:
        gates = GatedModel(model, self.owner.moe_layers, activation_level)
        with closing(gates):
            before = perplexity(gates, self.unseen)
            num_tokens = learn(gates, self.known, self.recipe, advance)
            return _Learnt(before, perplexity(gates, self.unseen), num_tokens, gates)
