"""One walk through all layers, plainly in order: the reference that every schedule must equal."""

from collections.abc import Callable
from contextlib import closing

from moebatch.engine.lanes.read_ahead import ReadAhead
from moebatch.engine.passes.broken import BrokenRows
from moebatch.engine.passes.passes import Passes, PassInput
from moebatch.model.decoder import Decoder
from moebatch.predict.predictor import RoutingObserver
from moebatch.spec.policy.policy import Policy
from moebatch.store.kv.cache import KVCache
from moebatch.store.streamed_layers import StreamedLayers


class PlainSweep(Passes):
    """Attention micro-batch by micro-batch, then each expert once, over all tokens of the pass that
    chose it. Nothing is read before a gate has asked for it, and nothing else runs meanwhile.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        experts: ReadAhead,
        policy: Policy,
        observer: RoutingObserver | None,
        streamed: StreamedLayers | None,
    ) -> None:
        """`observer` sees what the gates choose; `streamed` are layers whose weights outside
        experts do not stay."""
        super().__init__(decoder, cache, policy, main="dram")
        self._experts = experts
        self._observer = observer
        self._streamed = streamed
        self._num_layers_begun = 0

    def give_up(self) -> None:
        self._experts.forget_required()

    @property
    def num_ended(self) -> int:
        """Layers that have begun."""
        return self._num_layers_begun

    def doing(self) -> str:
        return f"layer {self._num_layers_begun - 1}, counted on from pass to pass"

    def interrupt(self, error: BaseException) -> None:
        """Nothing to do: `layer_begins` raises the error."""

    def _run_layers(self, given: PassInput, layer_begins: Callable[[int], None]) -> BrokenRows:
        x_TD = given.x_TD
        if self._observer is not None:
            self._observer.begin_pass(len(x_TD), given.tokens)
        decoder, shape, broken = self._decoder, self._decoder.shape, BrokenRows()
        for layer in range(shape.num_layers):
            self._num_layers_begun += 1
            layer_begins(layer)
            if self._streamed is not None and layer in self._streamed:
                self._streamed.bring(layer)
            for item in given.inputs:
                parts = self.cache.parts("dram", layer, item.window)
                decoder.attend(layer, x_TD, item.direct, parts)
            rows = given.layout.rows_in(shape, layer)
            if not shape.is_moe(layer):
                decoder.add_dense(layer, x_TD, rows)
                broken.look(x_TD, layer, None)
                continue
            routing = decoder.route(layer, x_TD, rows)
            if self._observer is not None and rows.start < rows.stop:
                chosen_RK, normed_RD = routing.chosen(rows), routing.normed_TD[rows]
                self._observer.observe(layer, slice(0, len(chosen_RK)), chosen_RK, normed_RD)
            with closing(self._experts.require(layer, routing.experts)) as chosen:
                for expert, tensors in chosen:
                    decoder.run_experts(layer, routing, {expert: tensors})
            decoder.combine(layer, x_TD, routing)
            broken.look(x_TD, layer, routing)
        return broken
