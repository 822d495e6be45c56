"""What answers faster for not quite the model's own answers, and what it is held against."""

from collections.abc import Mapping

from tests.benchmarks.predictors.rig import Setting

_CHUNKS = 3
EXACT = "AdapMoE without gating"
ON_DEMAND = "on demand"
SETTINGS: Mapping[str, Setting] = {
    EXACT: Setting(predictor="next-gate", schedule="promoe", num_chunks=_CHUNKS),
    "adaptive gating": Setting(
        predictor="next-gate", schedule="promoe", num_chunks=_CHUNKS, gating="adaptive"
    ),
    ON_DEMAND: Setting(predictor="none", schedule="ondemand", num_chunks=_CHUNKS),
    "prefetch all": Setting(predictor="none", schedule="prefetch_all", num_chunks=_CHUNKS),
    "pre-gated": Setting(
        predictor="none", schedule="pregated", num_chunks=_CHUNKS, gating="pre-gated"
    ),
}
"""The first two are a pair, and so are the last ones: each is as fast as its first one says."""
BASES: Mapping[str, str] = {
    EXACT: EXACT,
    "adaptive gating": EXACT,
    ON_DEMAND: ON_DEMAND,
    "prefetch all": ON_DEMAND,
    "pre-gated": ON_DEMAND,
}
