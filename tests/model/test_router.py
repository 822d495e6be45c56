"""Routers of families, as transformers computes them: choices, weights, and what gates foresee."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moebatch.errors import CheckpointError
from moebatch.model.gpu.gates import GpuGates
from moebatch.model.products import Weights
from moebatch.model.routing.gates import Gate
from moebatch.model.routing.router import choose_experts, preferences
from moebatch.spec.families.parts import corrected_router
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.model.blocks import ExpertGroups, Router
from moebatch.spec.model.shape_reader import read_shape
from tests.gpu_kernels import DEVICE
from tests.model.driver import Driver

D, E, T = 16, 24, 300
LFM2 = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
_INTERPRETED = 12
"""Rows of those: Triton's interpreter takes some 30 ms for each."""
Reference = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Weights and experts of rows, in any order."""


def shape_router(architecture: str, **entries: Any) -> Router:
    config = {"architectures": [architecture], "num_experts_per_tok": 4, "hidden_size": D}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    return read_shape({**config, **heads, **entries}, "config.json").router


def noisy(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return module


def of_deepseek(version: int, **entries: Any) -> tuple[Router, nn.Module]:
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    own = {"n_routed_experts": E, **entries}
    router = shape_router(f"DeepseekV{version}ForCausalLM", **own)
    common = {"hidden_size": D, "num_attention_heads": 1, "num_experts_per_tok": 4, **own}
    if version == 2:
        return router, v2.DeepseekV2TopkRouter(v2.DeepseekV2Config(**common))
    return router, v3.DeepseekV3TopkRouter(v3.DeepseekV3Config(**common))


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"version": 2, "routed_scaling_factor": 16.0},
    "group-limited": {
        "version": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 6,
        "topk_group": 2,
    },
    "group-limited-all": {
        "version": 2,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 3,
    },
    "corrected": {"version": 3, "n_group": 1, "topk_group": 1},
    "corrected-groups": {"version": 3, "n_group": 6, "topk_group": 3},
    "corrected-one-group": {"version": 3, "n_group": 4, "topk_group": 1},
    "corrected-unnormed": {"version": 3, "n_group": 8, "topk_group": 4, "norm_topk_prob": False},
    "corrected-top-1": {
        "version": 3,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 1,
        "routed_scaling_factor": 1.0,
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers_of_deepseek(case: str, dtype: torch.dtype) -> None:
    router, module = of_deepseek(**CASES[case])
    noisy(module)
    hidden_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits_TE, weights_TK, experts_TK = module(hidden_TD)
    correction_E = getattr(module, "e_score_correction_bias", None)
    assert_chooses(router, logits_TE, correction_E, weights_TK, experts_TK, dtype)


def test_a_softmax_that_is_corrected_and_divided_by_a_least_sum() -> None:
    from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as ernie

    config = ernie.Ernie4_5_MoeConfig(
        hidden_size=D, moe_num_experts=E, moe_k=3, moe_norm_min=0.4, moe_intermediate_size=8
    )
    module = noisy(ernie.Ernie4_5_MoeTopKRouter(config))
    router = Router(has_correction=True, norm_order=1.0, least_norm=0.4, has_exact_logits=True)
    logits_TE, weights_TK, experts_TK = module(torch.randn(T, D))
    correction_E = module.moe_statics.e_score_correction_bias.detach().flatten()
    sums = weights_TK.sum(-1)
    assert (sums < 0.99).any() and (sums > 0.99).any()
    assert_chooses(router, logits_TE, correction_E, weights_TK, experts_TK, torch.float32)


@pytest.mark.parametrize("is_normed", [False, True])
def test_logits_are_corrected_of_which_weights_are_sigmoids(is_normed: bool) -> None:
    from transformers.models.kolibri1 import modeling_kolibri1 as kolibri

    own = {"num_experts": E, "norm_topk_prob": is_normed}
    config = kolibri.Kolibri1Config(hidden_size=D, num_experts_per_tok=4, **own)
    module = noisy(kolibri.Kolibri1TopKRouter(config))
    logits_TE, weights_TK, experts_TK = module(torch.randn(T, D))
    router = shape_router("Kolibri1ForCausalLM", **own)
    correction_E = module.e_score_correction_bias
    best_TK = (logits_TE.sigmoid() + correction_E).topk(4).indices
    assert (best_TK.sort().values != experts_TK.sort().values).any(), "scores are not corrected"
    assert_chooses(router, logits_TE, correction_E, weights_TK, experts_TK, torch.float32)


def test_sigmoids_are_divided_by_more_than_their_sum() -> None:
    """By 1e-6 more, which shows where scores are small."""
    from transformers.models.lfm2_moe import modeling_lfm2_moe as lfm2

    config = lfm2.Lfm2MoeConfig(
        hidden_size=D, num_experts=E, num_experts_per_tok=4, routed_scaling_factor=1.7
    )
    module, correction_E = noisy(lfm2.Lfm2MoeTopKRouter(config)), torch.randn(E)
    hidden_TD = torch.randn(T, D)
    hidden_TD[0] *= 8**0.5 / hidden_TD[0].norm()  # logits around -12
    with torch.no_grad():
        module.weight.copy_(-hidden_TD[0] + 0.1 * module.weight)
    hidden_TD[0] *= 1.5
    router = shape_router("Lfm2MoeForCausalLM", num_experts=E, routed_scaling_factor=1.7, **LFM2)
    logits_TE, weights_TK, experts_TK = module(hidden_TD, correction_E)
    assert weights_TK[0].sum() < 1.7 * 0.99
    assert_chooses(router, logits_TE, correction_E, weights_TK, experts_TK, torch.float32)


def test_a_softmax_over_what_is_chosen_is_one_that_is_made_to_sum_to_one() -> None:
    """As gpt-oss has it."""
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

    config = gpt_oss.GptOssConfig(hidden_size=D, num_local_experts=E, num_experts_per_tok=4)
    module = noisy(gpt_oss.GptOssTopKRouter(config))
    router = shape_router("GptOssForCausalLM", num_local_experts=E)
    assert router.bias
    assert_chooses(router, *_second_first(module(torch.randn(T, D) * 9)), torch.float32)


@pytest.mark.parametrize("order", [None, 1.0, 2.0, 0.5])
def test_weights_are_divided_by_the_norm_of_dbrx(order: float | None) -> None:
    from transformers.models.dbrx import modeling_dbrx as dbrx

    ffn = {"moe_num_experts": E, "moe_top_k": 4, "moe_normalize_expert_weights": order}
    config = dbrx.DbrxConfig(d_model=D, ffn_config={**ffn, "hidden_size": D, "ffn_hidden_size": 8})
    module = noisy(dbrx.DbrxFFN(config))
    logits_TE = torch.randn(T, E)
    router = shape_router("DbrxForCausalLM", d_model=D, n_heads=1, ffn_config=ffn)
    expected = module.route_tokens_to_experts(logits_TE)
    assert_chooses(router, logits_TE, None, *expected, torch.float32)


@pytest.mark.parametrize("shift", [3.0, 0.0, -3.0])
@pytest.mark.parametrize("jitter", [0.01, 0.2])
def test_experts_are_chosen_one_after_the_other_by_those_that_are_near(
    jitter: float, shift: float
) -> None:
    """As Phi-3.5-MoE has it."""
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits_TE = torch.randn(T, E, generator=torch.Generator().manual_seed(3)) + shift
    weights_TK, experts_TK = sparsemixer(logits_TE, jitter, training=False)
    assert (weights_TK < 0.9).any() and (weights_TK.diff(dim=-1) > 0.01).any()
    router = Router(scores="sparsemixer", near=2 * jitter)
    assert_chooses(router, logits_TE, None, weights_TK, experts_TK, torch.float32)


def test_preferences_without_correction_are_the_logits() -> None:
    logits_TE = torch.randn(T, E).bfloat16()
    assert torch.equal(preferences(logits_TE, Router(), None), logits_TE.float())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"n_group": 5}, r"n_group \(5\) must divide 24 experts into groups of at least 2"),
        ({"n_group": 24}, r"n_group \(24\) must divide 24 experts into groups of at least 2"),
        ({"n_group": 8, "topk_group": 1}, r"topk_group \(1\) of 8 groups of 3 experts do not hold"),
        ({"n_group": 4, "topk_group": 5}, r"topk_group \(5\) of 4 groups of 6 experts do not hold"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor: expected a number above"),
        ({"n_group": None}, "n_group: expected a whole number"),
    ],
)
def test_groups_that_cannot_be_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        shape_router("DeepseekV3ForCausalLM", n_routed_experts=E, **entries)


def test_a_method_of_choice_that_is_not_known_is_refused() -> None:
    with pytest.raises(CheckpointError, match="topk_method: expected greedy or group_limited"):
        shape_router("DeepseekV2ForCausalLM", topk_method="noaux_tc")


def test_all_groups_kept_are_none() -> None:
    keys = FAMILIES["DeepseekV3ForCausalLM"].keys
    assert corrected_router(keys({})).groups == ExpertGroups(8, 4, 2)
    every = {"n_group": 8, "topk_group": 8}
    assert corrected_router(keys(every)).groups is None


def chosen_in_triton(
    logits_TE: Tensor, router: Router, num_chosen: int, weights: Weights, dtype: Any
) -> tuple[Tensor, Tensor]:
    """By the kernel of a GPU."""
    logits_TE = logits_TE.detach().to(DEVICE)
    weights_TK = torch.empty(len(logits_TE), num_chosen, device=DEVICE)
    experts_TK = torch.empty_like(weights_TK, dtype=torch.int64)
    weights = {role: weight.detach().to(DEVICE) for role, weight in weights.items()}
    GpuGates().choose(logits_TE, router, (weights_TK, experts_TK), weights, dtype)
    return weights_TK, experts_TK


def _second_first(found: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, None, Tensor, Tensor]:
    logits_TE, weights_TK, experts_TK = found
    return logits_TE, None, weights_TK, experts_TK


def assert_chooses(
    router: Router,
    logits_TE: Tensor,
    correction_E: Tensor | None,
    weights_TK: Tensor,
    experts_TK: Tensor,
    dtype: torch.dtype,
) -> None:
    """As transformers does, in descending order; and what gates foresee is chosen."""
    K = experts_TK.shape[1]
    by_role = {} if correction_E is None else {"router_correction": correction_E}
    ours_TK, chosen_TK = choose_experts(logits_TE, router, K, by_role, dtype)
    assert ours_TK.dtype == weights_TK.dtype
    dense_TE = torch.zeros(len(logits_TE), E).scatter_(1, experts_TK, weights_TK.float())
    in_triton = chosen_in_triton(logits_TE[:_INTERPRETED], router, K, by_role, dtype)
    tolerance = torch.finfo(dtype).eps if ours_TK.dtype == dtype else 1e-6
    for weights, experts in ((ours_TK, chosen_TK), in_triton):
        assert (weights.diff(dim=-1) <= 0).all()
        ours_TE = torch.zeros(len(weights), E, device=weights.device)
        ours_TE.scatter_(1, experts, weights.float())
        want_TE = dense_TE[: len(weights)].to(weights.device)
        torch.testing.assert_close(ours_TE, want_TE, rtol=2 * tolerance, atol=1e-6)
    foreseen_TK = preferences(logits_TE, router, correction_E).topk(K, dim=-1).indices
    is_same_T = (foreseen_TK.sort().values == chosen_TK.sort().values).all(dim=-1)
    assert is_same_T.float().mean() > 0.99, "but for ties"


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "gemma4_text"])
def test_gates_by_themselves_choose_from_what_experts_see_as_in_the_model(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    driver = Driver(tiny_checkpoint(family))
    shape, generator = driver.shape, torch.Generator().manual_seed(3)
    x_TD = torch.randn(T, shape.hidden_size, generator=generator)
    gates = Gate.all_of(driver.files, torch.float32)
    for layer, gate in zip(shape.moe_layers, gates, strict=True):
        with torch.inference_mode():
            routing = driver.decoder.route(layer, x_TD)
            found_TK = gate(routing.normed_TD).topk(shape.experts_per_token).indices
        assert torch.equal(found_TK.sort().values, routing.experts_TK.sort().values)
