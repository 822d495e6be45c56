"""Which layer's gate chooses the experts of which (Pre-gated MoE, section 3)."""

from collections.abc import Collection, Mapping


def chosen_ahead(moe_layers: Collection[int], activation_level: int) -> Mapping[int, int]:
    """By layer, the later one for which its pre-gate chooses.

    Of B layers with experts and activation level N, those are the first B - N; the first N have
    gates of their own for themselves. Empty at level 0, where every gate chooses for its own layer.
    """
    blocks = sorted(moe_layers)
    later = blocks[activation_level:] if activation_level else []
    return dict(zip(blocks, later, strict=False))
