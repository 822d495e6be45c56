"""ProMoE's ablation: each step is what the one before it is, and one thing more. The last one is
not in the paper: what is foreseen also decides who stays."""

from collections.abc import Mapping

from tests.benchmarks.predictors.rig import Setting

PREDICTOR = "learned"
NUM_CHUNKS = 3
"""An expert's three matrices, as in the paper."""
BASE = "base, LRU"
STEPS: Mapping[str, Setting] = {
    BASE: Setting(predictor="none", schedule="promoe_base"),
    "+ prefetch": Setting(predictor=PREDICTOR, schedule="promoe_prefetch"),
    "+ chunks": Setting(predictor=PREDICTOR, schedule="promoe_prefetch", num_chunks=NUM_CHUNKS),
    "+ early preemption": Setting(
        predictor=PREDICTOR, schedule="promoe_preempt", num_chunks=NUM_CHUNKS
    ),
    "+ reordered": Setting(predictor=PREDICTOR, schedule="promoe", num_chunks=NUM_CHUNKS),
    "+ foreseen stay": Setting(
        predictor=PREDICTOR, schedule="promoe", num_chunks=NUM_CHUNKS, cache="foreseen"
    ),
}
