"""The cache of each rule."""

from collections.abc import Mapping

from moebatch.schedule.slots.cache import Cache, Rule
from moebatch.schedule.slots.layer_cache import LayerCache
from moebatch.schedule.slots.shared_cache import SharedCache


def make_cache(sizes: Mapping[int, int], rule: Rule = "lifo") -> Cache:
    """An empty one with `sizes` slots by layer; layers that are not there have none."""
    if rule == "foreseen":
        return SharedCache(sum(sizes.values()))
    return LayerCache(sizes, rule)
