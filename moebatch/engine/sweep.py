"""One walk through all layers, plainly in order: the reference that every schedule must equal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from moebatch.engine.batcher import Slice
from moebatch.engine.broken import BrokenRows
from moebatch.engine.layout import attention_inputs, lay_out
from moebatch.engine.logits import LogitsBlock, logits_blocks
from moebatch.engine.read_ahead import ReadAhead
from moebatch.model.batch import MicroBatch, Span
from moebatch.model.decoder import Decoder
from moebatch.predict.predictor import RoutingObserver
from moebatch.schedule.kv_route import Place
from moebatch.spec.policy import Policy
from moebatch.store.kv import KVCache


class PlainSweep:
    """Attention micro-batch by micro-batch, then each expert once, over all tokens of the pass that
    chose it. Nothing is read before a gate has asked for it, and nothing else runs meanwhile.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        experts: ReadAhead,
        policy: Policy,
        observer: RoutingObserver | None = None,
    ) -> None:
        """`observer` sees what the gates choose."""
        self._decoder = decoder
        self._cache = cache
        self._experts = experts
        self._policy = policy
        self._observer = observer
        self._num_layers_begun = 0

    @property
    def num_layers(self) -> int:
        """Layers of a walk."""
        return self._decoder.shape.num_layers

    def run(
        self, slices: Sequence[Slice], layer_begins: Callable[[int], None]
    ) -> Iterator[LogitsBlock]:
        """Yields the logits from which next tokens come, block by block.

        All slices are counted as cached when the first block is yielded. `layer_begins` is called
        with every layer.
        """
        layout = lay_out(
            slices,
            self._policy.micro_batch_size,
            self._cache,
            decode_place="dram",
            prompt_place="dram",
        )
        inputs = attention_inputs(layout, self._cache, self._micro_batch)
        tokens = layout.pass_tokens
        x_TD = self._decoder.embed(torch.from_numpy(tokens.tokens_T))
        if self._observer is not None:
            self._observer.begin_pass(len(x_TD), replace(tokens, embedded_TD=x_TD))
        broken = self._run_layers(x_TD, [item.direct for item in inputs], layer_begins)
        yield from logits_blocks(self._decoder, x_TD, layout, broken)

    def give_up(self) -> None:
        """After a pass that failed: the next one may begin at the first layer again."""
        self._experts.forget_required()

    @property
    def num_ended(self) -> int:
        """Layers that have begun."""
        return self._num_layers_begun

    def doing(self) -> str:
        """The layer in work."""
        return f"layer {self._num_layers_begun - 1}, counted on from pass to pass"

    def interrupt(self, error: BaseException) -> None:
        """Nothing to do: `layer_begins` raises the error."""

    def close(self) -> None:
        """Nothing runs beside it."""

    def _run_layers(
        self,
        x_TD: Tensor,
        micro_batches: Sequence[MicroBatch],
        layer_begins: Callable[[int], None],
    ) -> BrokenRows:
        decoder, shape, broken = self._decoder, self._decoder.shape, BrokenRows()
        for layer in range(shape.num_layers):
            self._num_layers_begun += 1
            layer_begins(layer)
            for micro_batch in micro_batches:
                keys, values = self._cache.keys_RGC[layer], self._cache.values_RGC[layer]
                decoder.attend(layer, x_TD, micro_batch, keys, values)
            if not shape.is_moe(layer):
                decoder.add_dense(layer, x_TD)
                broken.look(x_TD, layer, None)
                continue
            routing = decoder.route(layer, x_TD)
            if self._observer is not None:
                every = slice(0, len(x_TD))
                self._observer.observe(layer, every, routing.chosen(every), routing.normed_TD)
            with closing(self._experts.require(layer, routing.experts)) as chosen:
                for expert, tensors in chosen:
                    decoder.run_expert(layer, routing, expert, tensors)
            decoder.combine(layer, x_TD, routing)
            broken.look(x_TD, layer, routing)
        return broken

    def _micro_batch(self, spans: Sequence[Span], place: Place) -> MicroBatch:
        return self._decoder.micro_batch(spans)
