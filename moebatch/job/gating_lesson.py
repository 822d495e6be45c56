"""What adaptive gating has to know of a model: how much its layers matter, and what may be left out
for a loss that is wanted.

Shape letters: R rows, K experts per token.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp
from pathlib import Path

import torch
from torch import Tensor

from moebatch.engine.gating_file import save_gating
from moebatch.engine.model_files import ModelFiles
from moebatch.engine.whole_files import load_whole, whole_footprint
from moebatch.errors import CheckpointError, ConfigError, DoesNotFit, Fault
from moebatch.job.lessons import Advance
from moebatch.job.texts import TokenSequence
from moebatch.job.trade_off import trade_off
from moebatch.model.gating import AdaptiveGating
from moebatch.model.gating_count import GatingCount
from moebatch.model.learnt_gating import GatingPoint, LearntGating
from moebatch.model.readings import Reading, reading_batches
from moebatch.model.whole_model import WholeModel
from moebatch.plan.footprint import Footprint
from moebatch.store.memory import resident_bytes
from moebatch.units import format_bytes

ANSWER_TOKENS = 64
"""Most tokens of an answer that is given to a prompt."""
BATCH_TOKENS = 512
"""Tokens that are computed at a time, as far as sequences are no longer."""
_MOST_LEARNT = 16384
_MOST_EXAMINED = 8192
"""Tokens of which gradients are taken, and on which thresholds are tried."""
_DIGITS = 4
"""Of a threshold that somebody may want to type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatingLesson:
    """What has been learnt, and where it is."""

    file: Path
    learnt: LearntGating
    num_expected: int
    """Tokens on which perplexity was measured."""
    answers: bool
    """Whether they were answers of the model."""
    learn_s: float


def require_learnable(
    files: ModelFiles, *, num_unseen: int, longest: int, budget_bytes: int
) -> None:
    """Raises ConfigError and DoesNotFit, before anything is loaded, for what cannot be done."""
    if files.shape.experts_per_token == 1:
        raise _wrong("adaptive leaves out all experts of a token but one, and this model has one")
    if not num_unseen:
        raise _wrong("adaptive needs a tenth of the text to try thresholds on; give more text")
    footprint = whole_footprint(files, batch_tokens=max(BATCH_TOKENS, longest))
    held = resident_bytes()
    if held + footprint.total_bytes > budget_bytes:
        raise DoesNotFit(_too_large(footprint, held, budget_bytes))


def _wrong(message: str) -> ConfigError:
    return ConfigError([Fault(file="moebatch calibrate", where="--gating", message=message)])


def _too_large(footprint: Footprint, held: int, budget_bytes: int) -> str:
    terms = ", ".join(f"{name} {format_bytes(of)}" for name, of in footprint.terms.items())
    return (
        f"dram: adaptive gating learns from gradients, for which all of the model has to be in "
        f"memory: {format_bytes(held + footprint.total_bytes)} ({terms}, the program "
        f"{format_bytes(held)}), there are {format_bytes(budget_bytes)}. Leave --gating out, or "
        "calibrate the same model folder where there is more memory"
    )


class GatingTeacher:
    """A model in memory, and texts."""

    def __init__(
        self,
        files: ModelFiles,
        known: Sequence[TokenSequence],
        unseen: Sequence[TokenSequence],
        *,
        are_prompts: bool,
        advance: Advance,
    ) -> None:
        """Thresholds are tried on `unseen`. What counts of prompts is what the exact model answers
        to them, of other texts everything."""
        self._files = files
        self._known = _evenly(known, _MOST_LEARNT)
        self._unseen = _evenly(unseen, _MOST_EXAMINED)
        self._are_prompts = are_prompts
        self._advance = advance

    def teach(self, path: Path, *, wanted_loss: float) -> GatingLesson:
        """Learns and writes. Raises StorageError, and CheckpointError for weights that are no
        numbers."""
        begun = time.perf_counter()
        model = load_whole(self._files)
        known, unseen = self._readings(model, self._known), self._readings(model, self._unseen)
        self._advance(0.3)
        sensitivities = fisher_sums(model, known)
        if not all(torch.isfinite(torch.tensor(list(sensitivities.values())))):
            folder = self._files.checkpoint.folder
            raise CheckpointError(f"{folder}: gradients of this model are no numbers")
        self._advance(0.6)
        trial = GatingTrial(model, unseen, sensitivities, self._files.shape.num_experts)
        curve, chosen = trade_off(trial.measure, wanted_loss=wanted_loss)
        learnt = LearntGating(
            sensitivities=sensitivities,
            curve=curve,
            wanted_loss=wanted_loss,
            threshold=chosen.threshold,
        )
        save_gating(path, learnt, self._files.owner)
        return GatingLesson(
            file=path,
            learnt=learnt,
            num_expected=trial.num_expected,
            answers=self._are_prompts,
            learn_s=time.perf_counter() - begun,
        )

    def _readings(self, model: WholeModel, sequences: Sequence[TokenSequence]) -> list[Reading]:
        texts = [Reading(tokens) for tokens in sequences]
        return (
            answered(model, texts, self._files.shape.max_positions) if self._are_prompts else texts
        )


def answered(model: WholeModel, prompts: Sequence[Reading], max_positions: int) -> list[Reading]:
    """Prompts with what the model says to them."""
    found = []
    for batch in reading_batches(prompts, most_tokens=BATCH_TOKENS):
        room = max_positions - batch.tokens_BS.shape[1]
        said = model.answers(batch.tokens_BS, min(ANSWER_TOKENS, room))
        for prompt, answer in zip(batch.tokens_BS.tolist(), said, strict=True):
            found.append(Reading((*prompt, *answer), len(prompt)))
    return found


def fisher_sums(model: WholeModel, readings: Sequence[Reading]) -> dict[int, float]:
    """Of each MoE layer, the sum of the diagonal of F = mean of g g^T over tokens, where g = dL/dO:
    L the loss of a sequence, O what the layer's experts make of a token (AdapMoE, Eq. 6)."""
    sums: dict[int, float] = {}
    for batch in reading_batches(readings, most_tokens=BATCH_TOKENS):
        for layer, of_batch in model.squared_gradients(batch).items():
            sums[layer] = sums.get(layer, 0.0) + of_batch
    num_tokens = sum(len(reading.tokens) for reading in readings)
    return {layer: of / num_tokens for layer, of in sums.items()}


class GatingTrial:
    """Tries thresholds on texts."""

    def __init__(
        self,
        model: WholeModel,
        readings: Sequence[Reading],
        sensitivities: dict[int, float],
        num_experts: int,
    ) -> None:
        self._model = model
        self._batches = list(reading_batches(readings, most_tokens=BATCH_TOKENS))
        self._sensitivities = sensitivities
        self._num_experts = num_experts

    @property
    def num_expected(self) -> int:
        """Tokens that count."""
        return sum(batch.num_expected for batch in self._batches)

    def measure(self, share: float) -> GatingPoint:
        """What the threshold does at which exact gates would leave out such a share, 0..1, of all
        choices that can be left out."""
        return self.at(self._threshold(share))

    def at(self, threshold: float) -> GatingPoint:
        """What a threshold does."""
        gating, count = AdaptiveGating(threshold, self._sensitivities), GatingCount()

        def drop(layer: int, weights_RK: Tensor, experts_RK: Tensor) -> None:
            gating.drop(layer, weights_RK, experts_RK, self._num_experts)
            count.add(experts_RK == self._num_experts)

        with self._model.changed_gates(drop):
            loss = self._loss()
        return GatingPoint(
            threshold=threshold,
            perplexity=exp(loss),
            single_share=count.single_share,
            mean_experts=count.mean_experts,
        )

    def _threshold(self, share: float) -> float:
        all_N = self._least_thresholds_N
        place = round(share * len(all_N))
        return float(f"{float(all_N[place - 1]):.{_DIGITS}g}") if place else 0.0

    @cached_property
    def _least_thresholds_N(self) -> Tensor:
        """Of all choices that can be left out, the least threshold that does so; ascending."""
        gating, found = AdaptiveGating(0.0, self._sensitivities), []

        def look(layer: int, weights_RK: Tensor, experts_RK: Tensor) -> None:
            found.append(gating.least_thresholds(layer, weights_RK).flatten())

        with self._model.changed_gates(look):
            self._loss()
        return torch.cat(found).sort().values

    def _loss(self) -> float:
        """Of a token that counts, in the mean."""
        with torch.inference_mode():
            return sum(float(self._model.loss(batch)) for batch in self._batches) / max(
                1, self.num_expected
            )


def _evenly(sequences: Sequence[TokenSequence], most_tokens: int) -> Sequence[TokenSequence]:
    """About so many tokens of them, from all over."""
    num_tokens = sum(map(len, sequences))
    return sequences[:: -(-num_tokens // most_tokens)]
