"""Klotski's inequalities: how many batches have to share a layer's weights so that nothing waits.

Klotski (section 4) lets ``n`` batches go through a layer one after the other while the next weights
arrive: the gate, ``K`` experts that are expected to be hot, then the other activated ones. With
enough batches every transfer is done before its weights are needed.
"""

from dataclasses import dataclass

_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTimes:
    """Seconds and counts of one layer that has its experts to load, in a decoding pass.

    The letters are the paper's. Times of attention, gate and cache are those of one batch; times
    of experts are for all batches together, and change with their number.
    """

    attention_s: float
    """``tA``: attention, with its projections and norms."""
    gate_s: float
    """``tG``: the router, and whatever else passes every token beside the experts."""
    load_attention_s: float = 0.0
    """``tIO_A``: 0 where weights outside experts stay where they are used."""
    load_gate_s: float = 0.0
    """``tIO_G``, likewise."""
    load_expert_s: float
    """``tIO_E``: one expert."""
    load_cache_s: float = 0.0
    """``tIO_KV``: keys and values that do not live where attention is computed."""
    hot_s: float
    """``t_hot``: all hot experts."""
    cold_s: float
    """Sum of ``tE`` over the cold experts."""
    num_hot: int
    """``K``: experts that are loaded before the gate has chosen."""
    num_cold: float
    """``|Q|``: activated experts that are not among the hot ones, on the mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inequality:
    """Time that there is on the left, time that a transfer takes on the right."""

    name: str
    """``(4)`` to ``(7)``, the paper's numbers, or ``disk``."""
    meaning: str
    left_s: float
    right_s: float

    @property
    def holds(self) -> bool:
        """Whether the transfer is hidden."""
        return self.left_s >= self.right_s * (1 - _ROUNDING)


def inequalities(times: LayerTimes, num_batches: int) -> tuple[Inequality, ...]:
    """(4) to (7) for so many batches.

    With a cache that is loaded for each batch, its transfers stand in the way of those that follow
    on the same link, so they are added on the right of (5) to (7). Where fewer than one cold expert
    is activated, (6) waits for that part of one only.
    """
    attention = num_batches * times.attention_s
    routed = attention + num_batches * times.gate_s
    hot = routed + times.hot_s
    gate = times.load_gate_s
    loaded = gate + num_batches * times.load_cache_s
    expert, num_hot = times.load_expert_s, times.num_hot
    first_cold = (num_hot + min(1.0, times.num_cold)) * expert
    all_experts = (num_hot + times.num_cold) * expert
    rows = (
        ("(4)", "the gate arrives during attention", attention, gate),
        ("(5)", "hot experts arrive before they are due", routed, loaded + num_hot * expert),
        ("(6)", "the first cold expert arrives while hot ones compute", hot, loaded + first_cold),
        (
            "(7)",
            "all experts and the next attention arrive within the layer",
            hot + times.cold_s,
            loaded + all_experts + times.load_attention_s,
        ),
    )
    return tuple(
        Inequality(name=name, meaning=meaning, left_s=left, right_s=right)
        for name, meaning, left, right in rows
    )


def disk_window(inequality_7: Inequality, read_s: float) -> Inequality:
    """Whether the disk keeps up in the long run: what a mean layer reads from it against the time
    of a layer. A window of layers in main memory only evens out variations.

    Args:
        inequality_7: its larger side is the time of a layer without a disk.
        read_s: seconds that the disk needs for a mean layer.
    """
    layer_s = max(inequality_7.left_s, inequality_7.right_s)
    meaning = "the disk keeps up with the layers"
    return Inequality(name="disk", meaning=meaning, left_s=layer_s, right_s=read_s)
