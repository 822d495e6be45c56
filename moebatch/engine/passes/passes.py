"""What takes a pass through the model, from tokens to the logits from which next ones come.

Shape letters: T tokens of the pass, R rows of one block, D hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moebatch.engine.batcher import Slice
from moebatch.engine.passes.broken import BrokenRows
from moebatch.engine.passes.exchange import CpuAttention
from moebatch.engine.passes.layout import AttentionInput, Layout, attention_inputs, lay_out
from moebatch.engine.passes.text_losses import TextLosses
from moebatch.engine.sequence import Sequence as TokenSequence
from moebatch.model.attention.span import Span
from moebatch.model.batch import MicroBatch
from moebatch.model.decoder import Decoder
from moebatch.predict.predictor import PassTokens
from moebatch.schedule.steps.kv_route import Place
from moebatch.spec.policy.policy import Policy
from moebatch.store.kv.cache import KVCache


class LogitsBlock(NamedTuple):
    """Logits of sequences whose known tokens have all been computed."""

    sequences: list[TokenSequence]
    logits_RV: Tensor
    """Where they have been computed, until the next block is asked for."""
    rows: list[int]
    """Row of each sequence's last token in the pass."""
    broken: BrokenRows


class PassInput(NamedTuple):
    """A pass at its first layer."""

    x_TD: Tensor
    """Hidden states, which layers change in place."""
    layout: Layout
    inputs: list[AttentionInput]
    """Of each micro-batch."""
    tokens: PassTokens


class Passes(ABC):
    """Takes slices of sequences through all layers: the overlapped pipeline, or the plain sweep."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        policy: Policy,
        *,
        main: Place,
        beside: CpuAttention | None = None,
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`main` computes everything, but for attention that is computed `beside` it."""
        self._decoder = decoder
        self.cache = cache
        self.policy = policy
        self._main: Place = main
        self._beside = beside
        self.computing = computing
        """For the thread that calls `run`, where it computes."""
        self.losses: TextLosses | None = None
        """Of texts that are read, if they are asked for before the first pass."""

    @property
    def num_layers(self) -> int:
        """Layers of a walk."""
        return self._decoder.shape.num_layers

    @property
    def encodes(self) -> bool:
        """Whether an encoder takes in prompts."""
        return self._decoder.shape.encoder is not None

    def run(
        self, slices: Sequence[Slice], layer_begins: Callable[[int], None]
    ) -> Iterator[LogitsBlock]:
        """Yields the logits from which next tokens come, block by block.

        All slices are counted as cached when the first block is yielded. `layer_begins` is called
        with every layer that tokens go through, before the first of them attend in it.
        """
        layout = lay_out(
            slices,
            self.policy.micro_batch_size,
            decode_place="dram" if self._beside else self._main,
            prompt_place=self._main,
        )
        tokens = layout.pass_tokens
        with self.computing():
            x_TD = self._decoder.embed(torch.from_numpy(tokens.tokens_T), layout.prompts)
            inputs = attention_inputs(layout, self.cache, self._micro_batch)
        given = PassInput(
            x_TD,
            layout,
            inputs,
            replace(tokens, embedded_TD=x_TD[:, : self._decoder.shape.hidden_size]),
        )
        broken = self._run_layers(given, layer_begins)
        if self.losses is not None:
            with self.computing():
                self.losses.add(self._decoder, x_TD, tokens)
        blocks = self._logits(x_TD, layout, broken)
        while True:
            with self.computing():
                block = next(blocks, None)
            if block is None:
                return
            yield block

    @abstractmethod
    def _run_layers(self, given: PassInput, layer_begins: Callable[[int], None]) -> BrokenRows:
        """Takes a pass through all layers; all of it has been computed then."""

    @abstractmethod
    def give_up(self) -> None:
        """After a pass that failed: the next one may begin at the first layer again."""

    @property
    @abstractmethod
    def num_ended(self) -> int:
        """Steps of work that have ended so far; grows while anything moves."""

    @abstractmethod
    def doing(self) -> str:
        """What is being done, or waited for, in words."""

    @abstractmethod
    def interrupt(self, error: BaseException) -> None:
        """Ends the pass in work with `error`, as soon as may be; any thread may call it."""

    def _micro_batch(
        self,
        spans: Sequence[Span],
        apart: Mapping[int, Sequence[Span]],
        place: Place,
    ) -> MicroBatch:
        device = self._beside.core.device if self._beside and place == "dram" else None
        return self._decoder.planner.plan(spans, apart=apart, attention_device=device)

    def _logits(self, x_TD: Tensor, layout: Layout, broken: BrokenRows) -> Iterator[LogitsBlock]:
        """Of a pass that has gone through all layers; counts its tokens as cached first."""
        ends = layout.ends
        for sequence, num_tokens in layout.ordered:
            sequence.num_cached += num_tokens
        at_once = self._decoder.logits_rows
        for first in range(0, len(ends), at_once):
            block = ends[first : first + at_once]
            sequences, rows = [sequence for sequence, _ in block], [row for _, row in block]
            yield LogitsBlock(sequences, self._decoder.logits(x_TD[rows]), rows, broken)
