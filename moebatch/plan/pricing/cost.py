"""Seconds that each lane is busy during a pass: the corrected form of MoE-Lightning's model.

MoE-Lightning (section 4) counts attention and expert FFN of decoding sequences. Added here: the
other of attention's two products, projections, routers, shared experts and the head; only those
experts that some token chooses; prompt slices beside decoding sequences; hidden states and new
keys and values on their way between levels; the copy into pinned buffers; and the disk.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import ceil

from moebatch.layout.habits import Habits
from moebatch.layout.ladder import lanes_of
from moebatch.layout.lanes import LaneSeconds, pass_seconds, takes_turns
from moebatch.layout.load import PassLoad
from moebatch.layout.setup import staying
from moebatch.plan.pricing.expected_loads import ExpectedLoads, LayerTimes, expected_loads
from moebatch.plan.pricing.pass_tasks import PassTasks
from moebatch.plan.pricing.price import Price
from moebatch.plan.pricing.prices import LaneTime, Prices
from moebatch.schedule.registry import traits_of
from moebatch.spec.policy.policy import Policy

Arithmetic = dict[Hashable, LaneSeconds]
"""Seconds in which processors compute, by all that they depend on beside the prices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Prices passes of one model on one machine."""

    prices: Prices
    habits: Habits | None = None
    """Of the model's routing, which else is taken to be even and foreseen."""

    def lanes(
        self, load: PassLoad, policy: Policy, known: Arithmetic | None = None
    ) -> dict[str, float]:
        """Busy seconds of every lane during a pass under `policy`; idle lanes are left out.
        `known` remembers those in which processors compute, which many passes share."""
        tasks, known = self._tasks(load, policy), {} if known is None else known
        key = tasks.key
        computing = known.get(key)
        if computing is None:
            computing = known[key] = _by_lane(tasks.computing())
        loads = self.loads(load, policy)
        there = lanes_of(self.prices.ladder, policy)
        seconds = {**{lane.name: 0.0 for lane in there}, **computing}
        for lane, time_s in tasks.moving(None if loads is None else loads.num_loads):
            if time_s:
                seconds[lane] += time_s
        return {lane: time_s for lane, time_s in seconds.items() if time_s > 0}

    def seconds(self, load: PassLoad, policy: Policy) -> float:
        """Length of a pass."""
        return self.seconds_of(self.lanes(load, policy), load, policy)

    def seconds_of(self, lanes: LaneSeconds, load: PassLoad, policy: Policy) -> float:
        """The same where its `lanes` are known: side by side, and with what they wait for."""
        reading_s = lanes.get("disk->dram", 0.0) + self.full_slots_s(load, policy)
        waiting_s = max(self._waiting_s(load, policy), self._turns_s(lanes, policy))
        return max(pass_seconds(lanes, policy), reading_s, waiting_s)

    def loads(self, load: PassLoad, policy: Policy) -> ExpectedLoads | None:
        """Experts that come in a pass of few tokens, in time, late and in vain; None where habits
        are not known or of no account."""
        habits, shape = self.habits, self.prices.shape
        if habits is None or not habits.covers(load.tokens):
            return None
        if traits_of(policy).foresees != "likely" or not policy.num_slots:
            return None
        predictor = habits.predictor_of(policy)
        sizes = staying(shape, policy, self.prices.ladder)
        tasks = self._tasks(load, policy)
        times = LayerTimes(
            outside_s=tasks.outside_s / shape.num_layers,
            expert_s=tasks.expert_s,
            load_s=tasks.load_s,
        )
        return expected_loads(
            times,
            habits.chosen(load.tokens),
            habits.absent(policy.cache, predictor, load.tokens, sizes),
            habits.right(predictor, load.tokens),
            num_slots=policy.num_slots,
        )

    def _waiting_s(self, load: PassLoad, policy: Policy) -> float:
        """Length of a pass that waits for experts which no predictor has foreseen."""
        loads = self.loads(load, policy)
        if loads is None:
            return 0.0
        num_dense = self.prices.shape.num_layers - len(self.prices.shape.moe_layers)
        return (
            loads.seconds
            + num_dense / self.prices.shape.num_layers * self._tasks(load, policy).outside_s
        )

    def _turns_s(self, lanes: LaneSeconds, policy: Policy) -> float:
        """Length of a pass whose GPU waits for experts after the CPU has attended: until then no
        more come than there are slots for. Zero where processors do not take turns."""
        if not (takes_turns(policy) and policy.num_slots):
            return 0.0
        price = Price(prices=self.prices, policy=policy)
        there_s = len(self.prices.shape.moe_layers) * price.up_s(policy.num_slots)
        attending_s = lanes.get("cpu", 0.0)
        coming_s = lanes.get("dram->vram", 0.0) - min(attending_s, there_s)
        return attending_s + max(lanes.get("gpu", 0.0), coming_s)

    def _tasks(self, load: PassLoad, policy: Policy) -> PassTasks:
        return PassTasks(prices=self.prices, load=load, policy=policy)

    def full_slots_s(self, load: PassLoad, policy: Policy) -> float:
        """Seconds of a pass in which the disk is not read: all slots of main memory hold experts
        that wait for the CPU, which is busy with the rest of a layer.

        Reading goes on until the slots are full, and again when the first of them is given back.
        Zero where slots belong to a GPU.
        """
        if self.prices.ladder.top == "vram" or not policy.weights.disk or not policy.num_slots:
            return 0.0
        filled_s = policy.num_slots * self._fetch_s
        gap_s, longest_s = self._tasks(load, policy).gaps_s
        usual_s, last_s = max(0.0, gap_s - filled_s), max(0.0, longest_s - filled_s)
        return (len(self.prices.shape.moe_layers) - 1) * usual_s + last_s

    def slots_never_full(self, load: PassLoad, policy: Policy) -> int:
        """Slots enough for the disk to be read without a pause between layers."""
        gap_s, _ = self._tasks(load, policy).gaps_s
        return ceil(gap_s / self._fetch_s)

    @property
    def _fetch_s(self) -> float:
        return self.prices.link_s("disk->dram", self.prices.expert_bytes)


def _by_lane(times: Iterable[LaneTime]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for lane, time_s in times:
        seconds[lane] = seconds.get(lane, 0.0) + time_s
    return seconds
