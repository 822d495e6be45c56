"""What the first passes of a run had to do, so that the same passes can be simulated.

Shape letters: E experts, R rows, K experts per token.
"""

from collections.abc import Sequence

from torch import Tensor

from moebatch.arrays import Floats
from moebatch.engine.passes.layout import Group, Layout, Part
from moebatch.layout.load import PassLoad
from moebatch.layout.routing import SkewedRouting
from moebatch.plan.replay.passes import load_of_slices
from moebatch.plan.simulation.passes import MicroBatches
from moebatch.predict.predictor import Chosen, RoutingObserver, counts_of
from moebatch.schedule.request import Sweep
from moebatch.spec.model.shape import ModelShape


class PassLog(RoutingObserver):
    """Keeps loads and routing of the first passes; the routing of a simulation of them.

    Observes gates where a schedule hears of them. What it has not heard, it makes up evenly.
    """

    def __init__(self, shape: ModelShape, num_passes: int) -> None:
        self.passes: list[MicroBatches] = []
        self._num_passes = num_passes
        self._layout: Layout | None = None
        self._rows: dict[tuple[int, int, int], Floats] = {}
        self._chosen: dict[int, Floats] = {}
        self._num_tokens: dict[int, int] = {}
        self._even = SkewedRouting(shape=shape)
        self._shape, self._num_experts = shape, shape.num_experts

    def begin(self, layout: Layout, sweep: Sweep) -> None:
        self._layout = layout if len(self.passes) < self._num_passes else None
        if self._layout is not None:
            ends = [row for _, row in layout.ends]
            loads = tuple(_load(group, ends) for group in layout.groups)
            self.passes.append(MicroBatches(loads=loads, on_cpu=sweep.on_cpu))

    def end_pass(self) -> None:
        """All of a pass has been computed: it stays, whatever becomes of its logits."""
        self._layout = None

    def drop_pass(self) -> None:
        """The pass in work was given up."""
        if self._layout is None:
            return
        self._layout = None
        self.passes.pop()
        number = len(self.passes)
        self._rows = {key: rows for key, rows in self._rows.items() if key[0] != number}

    # --- as an observer -------------------------------------------------------------------------

    def observe(
        self, layer: int, rows: slice, experts_RK: Chosen, hidden_RD: Tensor | None = None
    ) -> None:
        if self._layout is None:
            return
        number, before = len(self.passes) - 1, self._layout.rows_in(self._shape, layer).start
        rows = slice(before + rows.start, before + rows.stop)
        for k, group in enumerate(self._layout.groups):
            first, last = max(rows.start, group.rows.start), min(rows.stop, group.rows.stop)
            if first < last:
                ours_RK = experts_RK[first - rows.start : last - rows.start]
                counts_E = counts_of(ours_RK, self._num_experts)
                self._rows[number, layer, k] = counts_E + self._rows.get((number, layer, k), 0.0)
                self._chosen[layer] = counts_E + self._chosen.get(layer, 0.0)
                self._num_tokens[layer] = self._num_tokens.get(layer, 0) + last - first

    # --- as the routing of a simulation ---------------------------------------------------------

    def rows(self, number: int, layer: int, micro_batch: int, tokens: float) -> Floats:
        """Tokens of each expert, [E]."""
        known = self._rows.get((number, layer, micro_batch))
        return self._even.rows(number, layer, micro_batch, tokens) if known is None else known

    def chances(self, layer: int) -> Floats:
        """With what chance a token has chosen each expert, [E]; K in all."""
        counts_E = self._chosen.get(layer)
        if counts_E is None:
            return self._even.chances(layer)
        return counts_E / self._num_tokens[layer]


def _load(group: Group, ends: Sequence[int]) -> PassLoad:
    """What a micro-batch has to do; `ends` are rows after which a token is chosen."""
    encoded = any(part.sequence.request.num_encoded for part in group.parts)

    def is_answer(part: Part) -> bool:
        return not group.encodes and (encoded or part.num_tokens == 1)

    slices = [(part.num_tokens, part.num_afterwards, is_answer(part)) for part in group.parts]
    num_answers = sum(part.num_tokens for part in group.parts if is_answer(part))
    num_ends = sum(group.rows.start <= row < group.rows.stop for row in ends)
    num_ending = max(0, num_ends - num_answers)
    return load_of_slices(slices, num_ending=num_ending, encodes=encoded)
