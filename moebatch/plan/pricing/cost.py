"""Seconds that each lane is busy during a pass: the corrected form of MoE-Lightning's model.

MoE-Lightning (section 4) counts attention and expert FFN of decoding sequences. Added here: the
other of attention's two products, projections, routers, shared experts and the head; only those
experts that some token chooses; prompt slices beside decoding sequences; hidden states and new
keys and values on their way between levels; the copy into pinned buffers; and the disk.
"""

from dataclasses import dataclass
from math import ceil

from moebatch.layout.habits import Habits
from moebatch.layout.lanes import LaneSeconds, pass_seconds, takes_turns
from moebatch.layout.placed import PlacedModel
from moebatch.layout.routing import chosen_experts
from moebatch.once import cached_property
from moebatch.plan.pricing.expected_loads import ExpectedLoads, LayerTimes, expected_loads
from moebatch.plan.pricing.waits import PassWaits

CACHE_WAITS = "cache_waits"
"""Among the limits of a pass what is no lane: computing, and waiting for keys and values."""


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from them is worked out once
class PassCost(PassWaits):
    """Seconds of a mean pass, lane by lane and in all."""

    habits: Habits | None
    """Of the model's routing, which else is taken to be even and foreseen."""

    @cached_property
    def lanes(self) -> LaneSeconds:
        """Busy seconds of every lane; idle lanes are left out."""
        again = self.again
        if not again:
            return self.lanes_once
        return {lane: time_s + again.get(lane, 0.0) for lane, time_s in self.lanes_once.items()}

    @cached_property
    def lanes_once(self) -> LaneSeconds:
        """The same if each expert came once in a layer: affine in the shares."""
        seconds = {**dict.fromkeys(self._price.lanes, 0.0), **self.computing_s}
        for lane, time_s in (*self.bringing_s.items(), *self.moving()):
            if time_s:
                seconds[lane] += time_s
        return {lane: time_s for lane, time_s in seconds.items() if time_s > 0}

    @property
    def limits(self) -> LaneSeconds:
        """The same, and where attention may wait for keys and values: seconds of computing with
        these waits, affine in the shares of layers like those of lanes."""
        waits_s = self.cache_waits_s
        if waits_s is None:
            return self.lanes_once
        return {**self.lanes_once, CACHE_WAITS: self.beside_s + self.experts_s + waits_s}

    @property
    def seconds(self) -> float:
        """Length of the pass: lanes side by side, and with what they wait for."""
        waiting_s = max(self._waiting_s, self._turns_s, self.waiting_s(self.lanes))
        busy_s = pass_seconds({**self.limits, **self.lanes}, self.policy)
        return max(busy_s, self._reading_s, waiting_s)

    @property
    def _reading_s(self) -> float:
        """Of the disk: while slots are full it may read keys and values."""
        lane = "disk->dram"
        once_s = self.bringing_s.get(lane, 0.0)
        weights_s = once_s + self.again.get(lane, 0.0)
        others_s = max(0.0, self.lanes.get(lane, 0.0) - weights_s)
        return weights_s + max(others_s, self.full_slots_s)

    @property
    def num_loads(self) -> float | None:
        return self.loads.num_loads if self.loads else None

    @cached_property
    def loads(self) -> ExpectedLoads | None:
        """Experts that come in a pass of few tokens, in time, late and in vain; None where habits
        are not known or of no account."""
        habits, policy, tokens = self.habits, self.policy, self.load.tokens
        if habits is None or not habits.covers(tokens):
            return None
        if self._price.traits.foresees != "likely" or not policy.num_slots:
            return None
        predictor, shape = habits.predictor_of(policy), self.prices.shape
        sizes = PlacedModel(shape, policy, self.prices.ladder).staying
        times = LayerTimes(
            outside_s=self.outside_s / shape.num_layers,
            expert_s=self.expert_s,
            load_s=self.load_s,
        )
        return expected_loads(
            times,
            habits.chosen(tokens),
            habits.absent(policy.cache, predictor, tokens, sizes),
            habits.right(predictor, tokens),
            num_slots=policy.num_slots,
        )

    @property
    def num_chosen(self) -> float:
        """Experts that some token chooses, where habits are not known if routing is even."""
        if self.loads is None or self.habits is None:
            return chosen_experts(self.prices.shape, self.load)
        return float(sum(self.habits.chosen(self.load.tokens)))

    @property
    def full_slots_s(self) -> float:
        """Seconds in which the disk is not read: all slots of main memory hold experts that wait
        for the CPU, which is busy with the rest of a layer.

        Reading goes on until the slots are full, and again when the first of them is given back.
        Zero where slots belong to a GPU, and where experts come again for as long as the CPU is
        behind.
        """
        policy, prices = self.policy, self.prices
        if prices.top == "vram" or not policy.weights.disk or not policy.num_slots or self.again:
            return 0.0
        filled_s = policy.num_slots * self._fetch_s
        gap_s, longest_s = self.gaps_s
        usual_s, last_s = max(0.0, gap_s - filled_s), max(0.0, longest_s - filled_s)
        return (self._num_moe - 1) * usual_s + last_s

    @property
    def slots_never_full(self) -> int:
        """Slots enough for the disk to be read without a pause between layers."""
        gap_s, _ = self.gaps_s
        return ceil(gap_s / self._fetch_s)

    @property
    def _waiting_s(self) -> float:
        """Length of a pass that waits for experts which no predictor has foreseen."""
        if self.loads is None:
            return 0.0
        layers = self.prices.shape.num_layers
        num_dense = layers - len(self.prices.shape.moe_layers)
        return self.loads.seconds + num_dense / layers * self.outside_s

    @property
    def _turns_s(self) -> float:
        """Length of a pass whose GPU waits for experts after the CPU has attended: until then no
        more come than there are slots for. Zero where processors do not take turns."""
        policy = self.policy
        if not (takes_turns(policy) and policy.num_slots):
            return 0.0
        there_s = self._num_moe * self._price.up_s(policy.num_slots)
        coming_s = self.lanes.get("dram->vram", 0.0) - min(self.beside_s, there_s)
        return self.beside_s + max(self.experts_s, coming_s)

    @property
    def _fetch_s(self) -> float:
        return self.prices.link_s("disk->dram", self.prices.expert_bytes)
