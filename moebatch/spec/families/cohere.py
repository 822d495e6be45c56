"""Cohere's Command A+ (``cohere2_moe``): experts see what attention sees, and what both make is
added together."""

from collections.abc import Container
from typing import Any

from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.kinds import (
    FULL,
    SLIDING,
    Windows,
    by_mlp_types,
    layer_types,
    rotated_by_windows,
    windows_of,
)
from moebatch.spec.families.parts import grouped_attention, mlps, norm_order
from moebatch.spec.model.blocks import Norm, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import usual_names

_PATTERN_OF_DENSE = "prefix_dense_sliding_window_pattern"
_SHARES = {"average": 0.5, "sum": 1.0}
"""By what both experts of the gate and the shared one are multiplied."""


def _reworded(keys: ConfigKeys) -> dict[str, Any]:
    """One of two norms, each with a key of its own."""
    is_rms = keys.value("rms_norm_eps") is not None
    eps = keys.positive("rms_norm_eps" if is_rms else "layer_norm_eps")
    return {"rms_norm_eps": eps, "norm_kind": "rms" if is_rms else "layer"}


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    if keys.value("rope_scaling") is not None:
        expected = "null, as which transformers takes it, with what scales in rope_parameters"
        keys.fault("rope_scaling", expected, keys.value("rope_scaling"))
    num_dense = min(num_layers, keys.count_or_zero("first_k_dense_replace"))
    sparse = by_mlp_types(keys, num_layers, range(num_dense, num_layers))
    attention = grouped_attention(keys, biases="attention_bias", rotates_neighbours=True)
    has_own_width = keys.value("prefix_dense_intermediate_size") is not None
    share = _share(keys) if keys.count_or_zero("num_shared_experts") else 1.0
    return Layers(
        **rotated_by_windows(
            keys,
            attention,
            _windows(keys, num_layers, num_dense),
            rotated=_rotated_dense(keys, num_layers, sparse),
        ),
        **mlps(
            keys,
            num_layers,
            sparse,
            width="intermediate_size",
            dense="prefix_dense_intermediate_size" if has_own_width else "intermediate_size",
            num_shared="num_shared_experts",
        ),
        shared_scale=share,
        router=_router(keys, share),
        norm=Norm(kind="rms" if keys.value("norm_kind") == "rms" else "layer"),
        norms=("input_norm",),
        adds_attention_late=True,
        logit_scale=keys.positive("logit_scale"),
    )


def _windows(keys: ConfigKeys, num_layers: int, num_dense: int) -> Windows:
    """Every n-th layer sees everything, of dense ones before the others and of these alike, where
    ``layer_types`` says nothing."""
    numbers = ((_PATTERN_OF_DENSE, num_dense), ("sliding_window_pattern", num_layers - num_dense))
    usual = [
        FULL if (layer + 1) % keys.count(key) == 0 else SLIDING
        for key, count in numbers
        for layer in range(count)
    ]
    return windows_of(keys, layer_types(keys, usual))


def _rotated_dense(keys: ConfigKeys, num_layers: int, sparse: Container[int]) -> Container[int]:
    """Layers without experts have rotary positions, where all of them are taken to see
    everything."""
    if keys.count(_PATTERN_OF_DENSE) != 1:
        return ()
    return [layer for layer in range(num_layers) if layer not in sparse]


def _share(keys: ConfigKeys) -> float:
    key = "shared_expert_combination_strategy"
    said = keys.value(key)
    if not isinstance(said, str) or said not in _SHARES:
        keys.fault(key, " or ".join(_SHARES), said)
        return 1.0
    return _SHARES[said]


def _router(keys: ConfigKeys, share: float) -> Router:
    """Softmax or sigmoids of the logits of those experts that are chosen."""
    said = keys.value("expert_selection_fn")
    if said == "softmax":
        return Router(norm_order=1.0, scale=share)
    if said != "sigmoid":
        keys.fault("expert_selection_fn", "softmax or sigmoid", said)
    return Router(scores="sigmoid", norm_order=norm_order(keys), scale=share)


COHERE2_MOE = FamilySpec(
    architecture="Cohere2MoeForCausalLM",
    model_type="cohere2_moe",
    reworded=_reworded,
    layers=_layers,
    rotary_type="llama",
    names=usual_names(shared=("mlp.shared_experts",)),
)
