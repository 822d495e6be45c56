"""Shapes of Hy4: latent attention with gates and scores without a value, and streams of hidden
states that are not mixed with each other."""

from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moebatch.model.scratch import Scratch
from moebatch.model.streams import StreamMixer
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.models import load_model
from moebatch.spec.model.shape_reader import read_shape
from tests import tiny
from tests.model import oracle
from tests.model.driver import Driver, read_tensors
from tests.model.test_oracle import assert_as_transformers
from tests.spec.described import Described

FAMILY = Described("hy_v4", "HYV4ForCausalLM")
shape_of = FAMILY.shape_of

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "q_lora_rank": 18,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 18,
    "hc_mult": 3,
}


@pytest.mark.parametrize(
    "entries",
    [
        {},
        SIZES,
        {**SIZES, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "head_dim": 256},
        {"hc_mult": 2, "hc_magnitude": 1.5, "hc_eps": 0.01, "swiglu_limit": 7.0},
        {"num_local_experts": 32, "routed_scaling_factor": 1.5, "n_shared_experts": 3},
        {"num_key_value_heads": 8, "num_attention_heads": 16, "index_topk": 512},
        {"layer_types": ["deepseek_sparse_attention"] * 34, "first_k_dense_replace": 3},
    ],
)
def test_configurations_mean_what_transformers_takes_them_for(entries: dict[str, Any]) -> None:
    shape, config = FAMILY.both(**entries)
    assert shape.num_experts == config.n_routed_experts
    assert shape.shared_expert_width == config.n_shared_experts * config.moe_intermediate_size
    assert shape.router.scale == config.routed_scaling_factor
    for layer, kind in enumerate(config.indexer_types):
        indexed = shape.attention_of(layer)
        assert isinstance(indexed, LatentAttention) and indexed.indexer is not None
        assert indexed.indexer.is_shared == (kind == "shared")
        assert indexed.indexer.most == config.index_topk
    clamp, streams, attention = shape.expert_clamp(0), shape.streams, shape.attention
    assert clamp is not None and clamp.limit == config.swiglu_limit and not shape.mlp_clamps
    assert streams is not None and streams.num_balancings is None
    assert (streams.count, streams.magnitude) == (config.hc_mult, config.hc_magnitude)
    assert streams.eps == streams.least_share == config.hc_eps
    assert isinstance(attention, LatentAttention)
    assert attention.num_heads == config.num_attention_heads
    assert attention.rope_head_dim == config.head_dim == config.qk_rope_head_dim
    assert attention.head_dim == config.qk_head_dim


@pytest.mark.parametrize("entries", [{}, SIZES, {"num_local_experts": 32, "rms_norm_eps": 0.1}])
def test_a_text_model_beside_one_that_sees_is_read_as_transformers_reads_it(
    entries: dict[str, Any],
) -> None:
    from transformers import AutoConfig

    text = {"model_type": "hy_v4_vl_text", **entries}
    text |= (
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
        if ("qk_rope_head_dim" in entries)
        else {}
    )
    own = {"architectures": ["HYV4VLForConditionalGeneration"], "model_type": "hy_v4_vl"}
    shape = read_shape({**own, "text_config": text}, "m/config.json")
    with tiny.quiet():
        config = AutoConfig.for_model("hy_v4_vl", text_config=text).text_config
    assert (shape.num_layers, shape.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert shape.num_experts == config.n_routed_experts
    assert shape.dense_width == config.intermediate_size
    attention = shape.attention
    assert isinstance(attention, LatentAttention) and attention.rotates_neighbours
    assert (attention.num_heads, attention.query_rank) == (
        config.num_attention_heads,
        config.q_lora_rank,
    )
    assert attention.norm_eps == config.rms_norm_eps == shape.rms_eps


def test_gates_are_as_many_as_values(tiny_checkpoint: Any) -> None:
    """And not as numbers of latents, whose sums the core puts out."""
    attention = shape_of(**SIZES).attention
    assert attention.gate_width == 4 * 18
    assert attention.result_width == 4 * 20


test_what_is_not_done_is_refused_by_the_names_of_the_file = FAMILY.refuses(
    ({"swiglu_limit": 0.0}, "swiglu_limit: expected a number above 0, got 0.0"),
    ({"hidden_act": "gelu"}, "hidden_act: expected silu or swish, got 'gelu'"),
    (
        {"layer_types": ["full_attention"] * 4},
        "layer_types: expected a list of indexed_attention and deepseek_sparse_attention",
    ),
    ({"hc_mult": 0}, "hc_mult: expected a whole number"),
    ({"hc_magnitude": -1.0}, "hc_magnitude: expected a number above 0, got -1.0"),
    ({"index_topk": None}, "index_topk: expected a whole number"),
    ({"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types has 3 entries for 4 layers"),
    **SIZES,
)


@pytest.mark.parametrize("place", ["hc_pre.{module}", "{module}", "{module}.hc_pre"])
def test_names_of_released_files_are_read_as_transformers_reads_them(
    tmp_path: Any, place: str
) -> None:
    """Layers that guess further tokens ahead are left alone."""
    folder = tiny.write_checkpoint(tmp_path, "hy_v4")
    model = oracle.load(folder)
    released = {}
    for name, tensor in model.state_dict().items():
        for module, held in (("hc_attn_layer", "attn_hc."), ("hc_mlp_layer", "ffn_hc.")):
            name = name.replace(held, f"{place.format(module=module)}.hc_")
        name = name.replace("hc_head.hc_", f"{place.format(module='hc_head')}.hc_head_")
        name = name.replace("self_attn.gate_proj", "self_attn.linear_gate")
        released[name.replace(".sinks", ".learnable_sink_param")] = tensor.clone()
    released["model.mtp_layers.0.eh_proj.weight"] = torch.ones(3, 5)
    (folder / "model.safetensors").unlink()
    save_file(released, folder / "model.safetensors", metadata={"format": "pt"})
    assert not any("attn_hc" in name or ".sinks" in name for name in read_tensors(folder))
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7)
    assert_as_transformers(Driver(folder), slice_tokens=7)


def test_streams_take_their_shares_as_they_are(tiny_checkpoint: Any) -> None:
    """What weighs nothing leaves a stream alone but for the least share; what weighs most adds the
    magnitude."""
    shape = shape_of(**SIZES, hc_magnitude=1.5, hc_eps=0.25)
    assert shape.streams is not None
    sizes = shape.streams.tensors("input_norm", 32)
    weights = {role: torch.zeros(size) for role, size in sizes.items()}
    weights["input_norm_streams_base"] = torch.tensor([0.0, 0, 0, -100, 0, 100])
    mixer = StreamMixer(shape)
    scratch = Scratch(5000, device=torch.device("cpu"), dtype=torch.float32)
    x_TS, made_TD = torch.randn(4, 3 * 32), torch.randn(4, 32)
    expected = x_TS.view(4, 3, 32) + torch.tensor([0.25, 1.0, 1.75])[:, None] * made_TD[:, None]
    mixer.spread(scratch.frame(), x_TS, weights, "input_norm", made_TD)
    assert torch.allclose(x_TS.view(4, 3, 32), expected, atol=1e-6)


def test_hy4_preview_is_as_large_as_said() -> None:
    shape = load_model("hy4-preview").shape
    assert FAMILIES[shape.architecture].model_type == "hy_v4"
    short = shape.attending_within(2048)
    assert short.kv_bytes_per_token(2) == 2 * 34 * 576
    assert shape.kv_bytes_per_token(2) == 2 * (34 * 576 + 10 * 128)
    assert short.attends_beside_gpu and not shape.attends_beside_gpu
    latents, keys = shape.cache_groups(2049)
    assert latents.layers == tuple(range(34))
    assert keys.layers == (0, *range(1, 34, 4))
