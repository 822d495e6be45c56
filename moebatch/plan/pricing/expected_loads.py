"""What it costs to bring experts when few tokens choose: which have to come, which of them come in
time, and how long a pass waits for the others.

A layer computes everything but its experts, then those that are ready while the others come. What
was foreseen comes while the link has nothing more urgent to do, and half of that is in vain if the
predictor is right half of the time (ProMoE: GoodPred = accuracy x FetchRate).

Shape letters: L MoE layers.
"""

from dataclasses import dataclass

import numpy as np

from moebatch.arrays import Floats

_ROUNDS = 64
_EXACT = 1e-6
_NEXT_TO_NOTHING = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """Seconds of a layer in a pass."""

    outside_s: float
    """All but its experts."""
    expert_s: float
    """One expert, computed."""
    load_s: float
    """One expert, brought to where it is computed."""


@dataclass(frozen=True, kw_only=True)
class ExpectedLoads:
    """Experts of a pass by layer, [L]."""

    chosen_L: Floats
    absent_L: Floats
    """Of these, those that do not stay where they are computed."""
    in_time_L: Floats
    """Of the absent ones, those that were foreseen and have come before they are asked for."""
    in_vain_L: Floats
    """Others that have come."""
    seconds_L: Floats
    """Length of the layer."""

    @property
    def num_loads(self) -> float:
        """Experts that are brought in a pass."""
        return float((self.absent_L + self.in_vain_L).sum())

    @property
    def ready(self) -> float:
        """Share of the experts that gates ask for which are on the level by then."""
        return 1 - float((self.absent_L - self.in_time_L).sum() / self.chosen_L.sum())

    @property
    def seconds(self) -> float:
        """All layers with experts."""
        return float(self.seconds_L.sum())


def expected_loads(
    times: LayerTimes, chosen_L: Floats, absent_L: Floats, right_L: Floats, *, num_slots: float
) -> ExpectedLoads:
    """The loads of a pass in which `right_L` of the experts that are foreseen are chosen; as many
    are foreseen as are chosen, and as many of them are absent. One of the slots is in use."""
    foreseen_L = np.maximum(absent_L, _NEXT_TO_NOTHING)
    fetched_L = np.minimum(1.0, max(0.0, num_slots - 1) / foreseen_L)
    for _ in range(_ROUNDS):
        waits_L = absent_L * (1 - right_L * fetched_L) * times.load_s
        free_L = _layer_s(times, chosen_L, waits_L) - waits_L
        possible_L = np.minimum(fetched_L, free_L / (foreseen_L * times.load_s))
        if np.allclose(possible_L, fetched_L, atol=_EXACT):
            break
        fetched_L = possible_L
    in_time_L = absent_L * right_L * fetched_L
    return ExpectedLoads(
        chosen_L=chosen_L,
        absent_L=absent_L,
        in_time_L=in_time_L,
        in_vain_L=absent_L * (1 - right_L) * fetched_L,
        seconds_L=_layer_s(times, chosen_L, (absent_L - in_time_L) * times.load_s),
    )


def _layer_s(times: LayerTimes, chosen_L: Floats, waits_L: Floats) -> Floats:
    """Experts are computed while others come; the last one to come is computed after that."""
    last_s = np.where(waits_L > 0, times.expert_s, 0.0)
    busy: Floats = times.outside_s + np.maximum(chosen_L * times.expert_s, waits_L + last_s)
    return busy
