"""Seconds that each lane is busy during a pass: the corrected form of MoE-Lightning's model.

MoE-Lightning (section 4) counts attention and expert FFN of decoding sequences. Added here: the
other of attention's two products, projections, routers, shared experts and the head; only those
experts that some token chooses; prompt slices beside decoding sequences; hidden states and new
keys and values on their way between levels; the copy into pinned buffers; and the disk.
"""

from dataclasses import dataclass

from moebatch.plan.load import PassLoad
from moebatch.plan.pass_arithmetic import PassArithmetic
from moebatch.plan.pass_transfers import PassTransfers
from moebatch.plan.prices import Prices
from moebatch.schedule.lanes import LANES
from moebatch.spec.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Prices passes of one model on one machine."""

    prices: Prices

    def lanes(self, load: PassLoad, policy: Policy) -> dict[str, float]:
        """Busy seconds of every lane during a pass under `policy`; idle lanes are left out."""
        arithmetic = PassArithmetic(prices=self.prices, load=load, policy=policy)
        transfers = PassTransfers(prices=self.prices, load=load, policy=policy)
        seconds = dict.fromkeys(LANES, 0.0)
        for lane, time_s in (*arithmetic.lanes(), *transfers.lanes()):
            seconds[lane] += time_s
        return {lane: time_s for lane, time_s in seconds.items() if time_s > 0}
