"""Packed training batches: many short conversations in one row, no padding between them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from demo.tasks import KINDS, draw_task
from demo.tokenizer import END, chat_frame

IGNORED: Final = -100
_DRAWN_AT_ONCE: Final = 64
_SYSTEM_SHARE: Final = 0.1
_SYSTEM: Final = ("You are a helpful assistant.", "Answer briefly.", "Give only the answer.")
_LEAST_WEIGHT: Final = 0.1
_EASE: Final = 0.02
"""How much one batch moves the running share of right answers of a kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One conversation. The last `answer_tokens` of its ids are what the model has to say."""

    kind: int
    ids: list[int]
    answer_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows of `B` by `S` tokens; positions begin anew with every conversation.

    `labels_BS` is already shifted: it holds the token after each place that belongs to an
    answer, and IGNORED elsewhere. `sample_BS` numbers the conversations, -1 where a row is
    empty. `kinds` has the kind of each conversation.
    """

    ids_BS: Tensor
    positions_BS: Tensor
    labels_BS: Tensor
    sample_BS: Tensor
    kinds: Tensor


@dataclass(kw_only=True, slots=True)
class TaskMix:
    """Draws training tasks, the more of a kind the worse the model does on it."""

    rng: Random
    right: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    """Running share of right answers by kind, 0..1."""

    def draw_kinds(self, count: int) -> list[str]:
        """Names of the kinds of the next tasks."""
        weights = [_LEAST_WEIGHT + 1 - share for share in self.right.values()]
        return self.rng.choices(list(self.right), weights, k=count)

    def learn(self, kinds: Tensor, right: Tensor) -> None:
        """Takes in which conversations of a batch were answered right."""
        for index, name in enumerate(KINDS):
            of_kind = right[kinds == index]
            if len(of_kind):
                self.right[name] += _EASE * (of_kind.float().mean().item() - self.right[name])


def samples(tokenizer: PreTrainedTokenizerFast, mix: TaskMix) -> Iterator[Sample]:
    """Endless conversations over training tasks, some of them with a system message."""
    frames = [chat_frame(tokenizer, system=system) for system in _SYSTEM]
    plain = chat_frame(tokenizer)
    numbers = {name: index for index, name in enumerate(KINDS)}
    while True:
        tasks = [
            draw_task(mix.rng, kind, held_out=False) for kind in mix.draw_kinds(_DRAWN_AT_ONCE)
        ]
        texts = []
        for task in tasks:
            framed = mix.rng.random() < _SYSTEM_SHARE
            before, after = mix.rng.choice(frames) if framed else plain
            texts += [before + task.prompt + after, task.answer + END]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for task, prompt, answer in zip(tasks, encoded[::2], encoded[1::2], strict=True):
            yield Sample(kind=numbers[task.kind], ids=prompt + answer, answer_tokens=len(answer))


def pack(source: Iterator[Sample], *, rows: int, row_tokens: int, pad: int) -> Batch:
    """Fills rows first-fit until a conversation finds no room; that one is dropped."""
    room = [row_tokens] * rows
    ids = torch.full((rows, row_tokens), pad)
    positions = torch.arange(row_tokens).repeat(rows, 1)
    labels = torch.full((rows, row_tokens), IGNORED)
    owner = torch.full((rows, row_tokens), -1)
    kinds: list[int] = []
    for sample in source:
        size = len(sample.ids)
        row = next((row for row in range(rows) if room[row] >= size), None)
        if row is None:
            break
        start = row_tokens - room[row]
        end = start + size
        room[row] -= size
        ids[row, start:end] = torch.tensor(sample.ids)
        positions[row, start:] = torch.arange(row_tokens - start)
        if end < row_tokens:
            positions[row, end:] = torch.arange(row_tokens - end)
        first = end - sample.answer_tokens
        labels[row, first - 1 : end - 1] = ids[row, first:end]
        owner[row, start:end] = len(kinds)
        kinds.append(sample.kind)
    return Batch(
        ids_BS=ids,
        positions_BS=positions,
        labels_BS=labels,
        sample_BS=owner,
        kinds=torch.tensor(kinds),
    )
