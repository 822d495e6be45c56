"""What a calibration learns of gates, from gradients: what they may leave out (adaptive gating),
and how they choose for later layers (pre-gates), which are held against gates that learn where they
are."""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import torch

from moebatch.advance import Advance, parts_of
from moebatch.calibration.learning_text import Expected, LearningText, evenly
from moebatch.calibration.order import CalibrationOrder
from moebatch.calibration.texts import PlacedText
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation_files import GATING, PREGATES, save_gating, save_pregates
from moebatch.errors import CheckpointError, ConfigError, DoesNotFit
from moebatch.measure.process_limits import detect_machine
from moebatch.model.routing.gating import GatingPoint, LearntGating
from moebatch.rows.prompts import RowReader
from moebatch.store.memory import resident_bytes, return_freed_memory
from moebatch.training.gating_trial import GatingTrial
from moebatch.training.learning_gates import LearningGates, Recipe, learn, require_movable
from moebatch.training.memory import whole_footprint
from moebatch.training.whole_model import ANSWER_TOKENS, WholeModel, load_whole, require_learnable
from moebatch.units import format_bytes, format_unlike

USUAL = Recipe()
_MOST_LEARNT_TOKENS = 16384
"""Of which gradients are taken for adaptive gating."""
_SHARES = tuple(tenth / 10 for tenth in range(11))
_FINEST = 0.005
"""Shares are not told apart any finer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateLesson:
    """What has been learnt, and where it is."""

    file: Path
    num_expected: int
    """Held-out tokens on which perplexity was measured."""
    expected: Expected
    """What they were."""
    learn_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GatingLesson(GateLesson):
    """How much gates may leave out."""

    learnt: LearntGating


@dataclass(frozen=True, kw_only=True, slots=True)
class PreGateLesson(GateLesson):
    """What pre-gates have learnt, and what they are worth; gates that stay have learnt, too."""

    activation_level: int
    num_tokens: int
    """That they have learnt from, those seen again included."""
    perplexity: Mapping[str, float]
    """Of what was held out, by what chooses experts."""


class GateLessons:
    """Those of one order: both, one of them or none."""

    def __init__(
        self,
        order: CalibrationOrder,
        files: ModelFiles,
        *,
        sequence_tokens: int,
        log: Callable[[str], None],
        advance: Advance,
    ) -> None:
        """Sequences are of `sequence_tokens` at most.

        Raises CheckpointError, ConfigError and DoesNotFit, before anything is read, for what cannot
        be learnt from gradients.
        """
        self._order, self._files = order, files
        self._sequence_tokens = sequence_tokens
        self._log, self._advance = log, advance
        self._text: LearningText | None = None
        self._held_bytes = resident_bytes()  # without transformers' models, which are counted apart
        if order.gating_loss is not None:
            if files.shape.experts_per_token == 1:
                why = "adaptive leaves out all experts of a token but one, and this model has one"
                raise _refusal("--gating", why)
            self._require_whole("--gating", files.dtype, learns=False)
        if order.activation_level is not None:
            num_layers = len(files.shape.moe_layers)
            if num_layers == 1:
                why = "gates choose for a later layer with experts, and this model has one"
                raise _refusal("--pregate", why)
            if order.activation_level >= num_layers:
                why = f"must be less than {num_layers}, the layers that have experts"
                raise _refusal("--level", why)
            self._require_whole("--pregate", torch.float32, learns=True)

    def take(self, reader: RowReader, text: PlacedText) -> None:
        """What gradients are taken of, if of anything. Raises InputError."""
        if self._order.gating_loss is not None or self._order.activation_level is not None:
            self._text = LearningText.of(
                self._order.source, reader, text.sequences, longest=self._sequence_tokens
            )

    def teach_gating(self) -> GatingLesson | None:
        """How much gates may leave out, if that was asked for: learns how much each layer matters,
        tries thresholds on what is held out, and writes. Raises StorageError, and CheckpointError
        for weights that are no numbers."""
        wanted_loss, text = self._order.gating_loss, self._text
        if wanted_loss is None or text is None:
            return None
        return_freed_memory()
        self._log(f"learning what gates may leave out for {wanted_loss:.3g} of perplexity")
        begun, files = time.perf_counter(), self._files
        model = load_whole(files, dtype=files.dtype, experts="eager")
        text = replace(text, known=evenly(text.known, _MOST_LEARNT_TOKENS))
        text = text.answered(model)
        self._advance(0.3)
        sensitivities = model.fisher_sums(text.known)
        if not all(map(isfinite, sensitivities.values())):
            folder = files.checkpoint.folder
            raise CheckpointError(f"{folder}: gradients of this model are no numbers")
        self._advance(0.6)
        trial = GatingTrial(model, text.unseen, sensitivities, files.shape.num_experts)
        curve, chosen = trade_off(trial.measure, wanted_loss=wanted_loss)
        learnt = LearntGating(
            sensitivities=sensitivities,
            curve=curve,
            wanted_loss=wanted_loss,
            threshold=chosen.threshold,
        )
        path = GATING.beside(self._order.table)
        save_gating(path, learnt, files.owner)
        return GatingLesson(
            file=path,
            learnt=learnt,
            num_expected=text.num_examined,
            expected=text.expected,
            learn_s=time.perf_counter() - begun,
        )

    def teach_pregates(self) -> PreGateLesson | None:
        """Trains gates that stay and gates that move alike, if that was asked for, and writes the
        latter. Raises StorageError."""
        level, text = self._order.activation_level, self._text
        if level is None or text is None:
            return None
        return_freed_memory()
        steps = f"{USUAL.num_steps} steps of {USUAL.batch_tokens} tokens"
        self._log(
            f"gates learn twice, where they are and moved, {steps} each, from "
            f"{len(text.known)} sequences of which they foretell {text.expected}"
        )
        begun, files = time.perf_counter(), self._files
        first, second = parts_of(self._advance, 2)
        model = load_whole(files, dtype=torch.float32, experts="grouped_mm")
        text = text.answered(model)
        staying = _trained(model, text, 0, first)
        moved = _trained(model, text, level, second)
        found = {
            "the checkpoint's gates": staying.before,
            "gates, trained": staying.after,
            "pre-gates, moved only": moved.before,
            "pre-gates, trained": moved.after,
        }
        path, num_tokens = PREGATES.beside(self._order.table), moved.num_tokens
        pregates = moved.gates.pregates()
        save_pregates(path, pregates, files.owner, num_tokens=num_tokens, perplexity=found)
        return PreGateLesson(
            file=path,
            activation_level=level,
            num_tokens=num_tokens,
            num_expected=text.num_examined,
            expected=text.expected,
            perplexity=found,
            learn_s=time.perf_counter() - begun,
        )

    def _require_whole(self, option: str, dtype: torch.dtype, *, learns: bool) -> None:
        """Raises CheckpointError where gradients cannot be had of the model, and DoesNotFit where
        there is too little memory for all of it in `dtype` with gradients; for gates that learn, if
        `learns`. `option` is what asked for it."""
        outline = require_learnable(self._files)
        if learns:
            require_movable(outline)
        longest = min(self._sequence_tokens + ANSWER_TOKENS, self._files.shape.max_positions)
        footprint = whole_footprint(self._files, dtype=dtype, longest=longest, learns=learns)
        room = self._order.dram_bytes or detect_machine().dram_bytes
        held = self._held_bytes
        if held + footprint.total_bytes <= room:
            return
        needed, there = format_unlike(held + footprint.total_bytes, room)
        terms = ", ".join(f"{name} {format_bytes(of)}" for name, of in footprint.terms.items())
        raise DoesNotFit(
            f"dram: {option} learns from gradients, for which all of the model has to be in "
            f"memory: that needs {needed} ({terms}, the program {format_bytes(held)}), there are "
            f"{there}; raise --dram, leave {option} out, or calibrate the same model folder where "
            "there is more memory and copy the file"
        )


def trade_off(
    measure: Callable[[float], GatingPoint], *, wanted_loss: float
) -> tuple[tuple[GatingPoint, ...], GatingPoint]:
    """Points by ascending threshold, and the last of them before perplexity passes the exact one by
    more than `wanted_loss`, which is a share of it.

    `measure` says what the threshold does at which about such a share, 0..1, is left out of all
    choices that can be; with 0 it is exact.
    """
    points = {share: measure(share) for share in _SHARES}
    most = points[0.0].perplexity * (1 + wanted_loss)
    too_much = [share for share, point in points.items() if point.perplexity > most]
    bad = min(too_much, default=1.0)
    good = max(share for share in _SHARES if share < bad) if too_much else 1.0
    while too_much and bad - good > _FINEST:
        middle = (good + bad) / 2
        points[middle] = measure(middle)
        if points[middle].perplexity > most:
            bad = middle
        else:
            good = middle
    by_threshold = {point.threshold: point for point in points.values()}
    curve = tuple(by_threshold[threshold] for threshold in sorted(by_threshold))
    return curve, by_threshold[points[good].threshold]


@dataclass(frozen=True, slots=True)
class _Trained:
    """Gates that have learnt; perplexity before and after."""

    before: float
    after: float
    num_tokens: int
    gates: LearningGates


def _trained(model: WholeModel, text: LearningText, level: int, advance: Advance) -> _Trained:
    with closing(LearningGates(model, level)) as gates:
        before = model.perplexity(text.unseen)
        num_tokens = learn(model, gates, text.known, USUAL, advance)
        return _Trained(before, model.perplexity(text.unseen), num_tokens, gates)


def _refusal(option: str, message: str) -> ConfigError:
    return ConfigError.at("moebatch calibrate", message, where=option)
