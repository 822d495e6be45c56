"""The decoder against transformers: families, options, layouts, dtypes, ways to cut the work."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moebatch.errors import CheckpointError
from moebatch.layout.scratch import Limits
from tests import tiny
from tests.model import oracle
from tests.model.cases import CASES, PLAIN, ROPES
from tests.model.driver import Driver, Seq, read_tensors

NUM_NEW = 8
Checkpoint = Callable[..., Path]
ALL = (
    *tiny.FAMILIES,
    *("gemma4_text", "llama4_text", "dbrx", "phimoe", "afmoe", "mistral3"),
    *("lfm2_moe", "granitemoehybrid", "nemotron_h", "kimi_linear", "minimax"),
    *("bailing_hybrid", "granitemoe_swa", "kolibri1", "flint", "lara_mini"),
    *("qwen3_omni_moe_thinker", "aria_text"),
    *("flex_olmo", "mimo_v2_flash", "longcat_flash", "step3p7", "glm4v_moe"),
    *("laguna", "cohere2_moe", "deepseek_v4", "hy_v4", "hy_v4_vl", "jamba", "axk2"),
    *("mistral_large4", "glm5_next", "ernie4_5_vl_moe", "minimax_m3_vl", "minimax_m3_vl_text"),
    *("dots3_note", "dots3_note_text", "beam", "kimi_k25", "internvl", "muse_spark"),
    "nemotron_h_omni",
)
MOST_OFF = {"minimax": 0.2, "dots3_note": 0.12}
"""Where layers keep what norms have made of hidden states, or latents and queries are multiplied by
more than one, rounding adds up more."""
NOT_STACKED = (
    *("kimi_linear", "bailing_hybrid", "longcat_flash", "deepseek_v4", "glm5_next"),
    "ernie4_5_vl_moe",
)
"""What transformers holds of these in memory is read under the names of files alone."""


@pytest.mark.few(case=(*PLAIN, *(case for case in CASES if case.startswith("gpt_oss-"))))
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(case: str, tiny_checkpoint: Checkpoint) -> None:
    """Prompts in slices of seven, joining one by one, mixed with decoding, three to a batch."""
    family, options = CASES[case]
    folder = tiny_checkpoint(family, **options)
    assert_as_transformers(Driver(folder), slice_tokens=7, micro_batch=3, stagger=2)


@pytest.mark.few(family=tiny.CACHED_APART)
@pytest.mark.parametrize("family", ALL)
def test_whole_prompts_at_once(family: str, tiny_checkpoint: Checkpoint) -> None:
    """No slices: causal attention without a mask."""
    folder = tiny_checkpoint(family)
    assert_as_transformers(Driver(folder), 4, shuffled=False)


@pytest.mark.few()
@pytest.mark.parametrize("window", [None, 100, 300, 600])
@pytest.mark.parametrize("slice_tokens", [1000, 350])
def test_long_prompts(window: int | None, slice_tokens: int, tiny_checkpoint: Checkpoint) -> None:
    """Prompts that need several blocks of masked queries."""
    folder = tiny_checkpoint(
        "mixtral", sliding_window=window, max_position_embeddings=1024, num_hidden_layers=2
    )
    limits = Limits(
        pass_tokens=1213,
        micro_batch_tokens=1213,
        context_tokens=703,
        gather_rows=64,
        expert_rows=500,
    )
    prompts = oracle.prompts(lengths=(700, 513))
    assert_as_transformers(
        Driver(folder, limits=limits), 3, prompts=prompts, slice_tokens=slice_tokens
    )


@pytest.mark.few(family=("mixtral", "deepseek_v3"))
@pytest.mark.parametrize(
    ("family", "fused"),
    [
        (name, fused)
        for name in ALL
        for fused in (False, True)
        if name not in NOT_STACKED or not fused
    ],
)
def test_bfloat16_is_as_close_to_float32_as_transformers(
    family: str, fused: bool, tiny_checkpoint: Checkpoint
) -> None:
    """Rounding may differ, but not be worse than in transformers' own bfloat16."""
    folder = tiny_checkpoint(family, dtype="bfloat16", fused=fused)
    exact, rounded = oracle.load(folder), oracle.load(folder, "bfloat16")
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    driver = Driver(folder, torch.bfloat16)
    for prompt in oracle.prompts(lengths=range(3, 43)):
        seq = driver.generate([prompt], 1)[0]
        _, want = oracle.greedy(exact, prompt, 1)
        _, other = oracle.greedy(rounded, prompt, 1)
        ours.append((seq.logits[0] - want[0]).abs().mean())
        theirs.append((other[0] - want[0]).abs().mean())
    # Medians, since a router that tips over changes a whole row of logits, in either.
    assert torch.stack(ours).median() < 1.2 * torch.stack(theirs).median()
    assert torch.stack(ours).median() < MOST_OFF.get(family, 0.1)


@pytest.mark.parametrize("fused", [False, True])
def test_stored_bfloat16_computed_in_float32(fused: bool, tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint("qwen2_moe", dtype="bfloat16", fused=fused)
    assert_as_transformers(Driver(folder))


def test_kimi_linear_as_it_is_released(tmp_path: Path) -> None:
    """Sizes of layers that recur apart, which count layers from one, keys that transformers passes
    over, and an MLP of its own name in layers without experts."""
    folder = tiny.write_checkpoint(tmp_path, "kimi_linear")
    config = json.loads((folder / "config.json").read_text())
    sizes = {key: config[f"linear_{key}"] for key in ("num_heads", "head_dim")}
    sizes["short_conv_kernel_size"] = config["linear_conv_kernel_dim"]
    lists = {"kda_layers": [1, 3], "full_attn_layers": [2]}
    gone = dict.fromkeys(key for key in config if key.startswith("linear_") or "layer_types" in key)
    tiny.edit_config(
        folder,
        **gone,
        linear_attn_config=sizes | lists,
        first_k_dense_replace=1,
        head_dim=72,
        mla_use_nope=True,
        rope_theta=10000.0,
    )
    dense = {f"block_sparse_moe.{role}_proj": f"mlp.{role}_proj" for role in ("gate", "up", "down")}
    tensors = {}
    for name, tensor in read_tensors(folder).items():
        for written, released in dense.items():
            name = name.replace(f".{written}.", f".{released}.")
        tensors[name] = tensor
    assert "model.layers.0.mlp.down_proj.weight" in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_as_transformers(Driver(folder), slice_tokens=7)


def test_ling_as_it_is_released(tmp_path: Path) -> None:
    """Keys of its own; limits of what experts compute, which transformers passes over and has for
    Step-3.7; and a layer that foretells tokens."""
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts, Step3p7MLP

    folder = tiny.write_checkpoint(
        tmp_path, "bailing_hybrid", layer_types=None, layer_group_size=3, linear_num_heads=4
    )
    model = oracle.load(folder)
    config = json.loads((folder / "config.json").read_text())
    names = {
        "max_position_embeddings": "model_max_length",
        "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize",
        "num_experts_per_tok": "num_experts_per_token",
    }
    limits = {
        "expert_swiglu_limit_list": [0, 0.6, 0.9],
        "share_expert_swiglu_limit_list": [0.7, 0, 0.4],
    }
    gone = [key for key in config if "linear_" in key or "layer_types" in key]
    tiny.edit_config(
        folder,
        **dict.fromkeys([*gone, *names.values()]),
        **{key: config.get(written, config.get(key)) for key, written in names.items()},
        **limits,
        architectures=["BailingMoeV3ForCausalLM"],
        gated_attention_proj_granularity_type="head_wise",
        head_dim=12,
        kda_lower_bound=-3.5,
        no_kda_lora=True,
        num_nextn_predict_layers=1,
        rope_parameters=None,
        scoring_func="sigmoid",
    )
    tensors = read_tensors(folder)
    for layer in (0, 1):
        start = f"model.layers.{layer}.attention."
        tensors[f"{start}o_proj.weight"] = tensors.pop(f"{start}dense.weight")
    tensors |= {
        name.replace(".layers.2.", ".layers.3."): torch.full_like(tensors[name], torch.nan)
        for name in {*tensors}
        if ".layers.2." in name
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    prompts = oracle.prompts()
    unlimited = [oracle.greedy(model, prompt, NUM_NEW)[0] for prompt in prompts]
    for layer, of_experts, of_shared in zip(model.model.layers, *limits.values(), strict=True):
        if hasattr(layer.mlp, "experts"):
            experts, shared = layer.mlp.experts, layer.mlp.shared_experts
            experts.__class__, experts.limit = Step3p7Experts, of_experts or torch.inf
            shared.__class__, shared.limit = Step3p7MLP, of_shared or torch.inf
    expected = [oracle.greedy(model, prompt, NUM_NEW) for prompt in prompts]
    seqs = Driver(folder).generate(prompts, NUM_NEW, slice_tokens=7)
    for seq, answer in zip(seqs, expected, strict=True):
        assert_same(seq, *answer)
    assert unlimited != [tokens for tokens, _ in expected]


def test_kimi_k2_5_as_it_is_released(tmp_path: Path) -> None:
    """Under the class of its own code, its text under that of Kimi-K2."""
    folder = tiny.write_checkpoint(tmp_path, "kimi_k25")
    model = oracle.load(folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    tiny.edit_config(
        folder,
        architectures=["KimiK25ForConditionalGeneration"],
        text_config=text | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"},
    )
    assert any(name.startswith("language_model.model.") for name in read_tensors(folder))
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7)


def test_internvl_as_it_is_released(tmp_path: Path) -> None:
    """Its text in an object of another name."""
    folder = tiny.write_checkpoint(tmp_path, "internvl")
    model = oracle.load(folder)
    config = json.loads((folder / "config.json").read_text())
    tiny.edit_config(
        folder,
        architectures=["InternVLChatModel"],
        model_type="internvl_chat",
        llm_config=config["text_config"],
        text_config=None,
    )
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7)


def test_rope_as_older_files_spell_it(tmp_path: Path) -> None:
    """``rope_theta`` and ``rope_scaling`` with ``type`` at the top level."""
    folder = tiny.write_checkpoint(tmp_path, "mixtral")
    scaling = {"type": "linear", "factor": 4.0}
    tiny.edit_config(folder, rope_parameters=None, rope_theta=777.0, rope_scaling=scaling)
    model = oracle.load(folder)
    assert model.config.rope_parameters["rope_theta"] == 777.0
    assert_as_transformers(Driver(folder), model=model)


def test_the_length_that_longrope_begins_at_may_stand_beside_its_parameters(tmp_path: Path) -> None:
    """As files spell it that are named after Phi-3. Prompts lie on both sides of it."""
    folder = tiny.write_checkpoint(tmp_path, "mixtral", head_dim=8, max_position_embeddings=128)
    scaling = {key: value for key, value in ROPES["longrope"].items() if "original" not in key}
    tiny.edit_config(
        folder, rope_parameters=None, rope_scaling=scaling, original_max_position_embeddings=32
    )
    model = oracle.load(folder)
    assert model.config.rope_parameters["original_max_position_embeddings"] == 32
    assert_as_transformers(Driver(folder), model=model)


@pytest.mark.parametrize(
    ("family", "architecture", "first", "bare"),
    [
        ("gemma4", "Gemma4ForConditionalGeneration", "model.language_model.", "model."),
        ("llama4", "Llama4ForConditionalGeneration", "language_model.", ""),
        ("aria", "AriaForConditionalGeneration", "language_model.", ""),
    ],
)
def test_text_models_in_checkpoints_that_hold_others_beside_them(
    family: str, architecture: str, first: str, bare: str, tmp_path: Path
) -> None:
    """Configurations nested, names behind those of the whole, tensors of others left alone."""
    folder = tiny.write_checkpoint(tmp_path / "text", f"{family}_text")
    model = oracle.load(folder)
    whole = tmp_path / "whole"
    whole.mkdir()
    tensors = {
        first + name.removeprefix(bare): tensor for name, tensor in read_tensors(folder).items()
    }
    save_file(tensors | {"vision.patch": torch.ones(3)}, whole / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    config = {"architectures": [architecture], "model_type": family, "text_config": text}
    config["tie_word_embeddings"] = text["tie_word_embeddings"]
    (whole / "config.json").write_text(json.dumps(config))
    assert_as_transformers(Driver(whole), model=model, slice_tokens=7)


def test_the_thinker_of_qwen3_omni_lies_beside_what_speaks(tmp_path: Path) -> None:
    """As released: its configuration one deeper, and so its names."""
    folder = tiny.write_checkpoint(tmp_path / "thinker", "qwen3_omni_moe_thinker", head_dim=10)
    model = oracle.load(folder)
    whole = tmp_path / "whole"
    whole.mkdir()
    tensors = {f"thinker.{name}": tensor for name, tensor in read_tensors(folder).items()}
    others = {"talker.model.layers.0.input_layernorm.weight": torch.full((7,), torch.nan)}
    save_file(tensors | others, whole / "model.safetensors")
    thinker = json.loads((folder / "config.json").read_text())
    text = thinker["text_config"]
    text |= {"rope_theta": text.pop("rope_parameters")["rope_theta"], "sliding_window": None}
    text["rope_scaling"] = {"type": "default", "rope_type": "default", "mrope_section": [2, 2, 1]}
    config = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "thinker_config": thinker,
        "talker_config": {"text_config": {"hidden_size": 7}},
    }
    (whole / "config.json").write_text(json.dumps(config))
    assert_as_transformers(Driver(whole), model=model, slice_tokens=7)


def test_rotary_parameters_of_gemma_that_are_null_are_the_usual_ones(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, "gemma4_text", rope_parameters=None)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rope_parameters": None}))
    assert_as_transformers(Driver(folder), 4)
    for kinds in ({"full_attention": None}, {"full_attention": {"rope_type": "default"}}):
        rotary = config["rope_parameters"] | kinds
        path.write_text(json.dumps(config | {"rope_parameters": rotary}))
        with pytest.raises(CheckpointError, match="those of full_attention must have a rope_theta"):
            Driver(folder)


def test_dots3_as_it_is_released(tmp_path: Path) -> None:
    """All of its text beside everything else in the configuration, sizes of layers that slide under
    names of their own, and tensors of a layer that foretells tokens."""
    folder = tiny.write_checkpoint(tmp_path, "dots3_note", moe_layer_freq=[0, 1, 0, 1])
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    own = {f"swa_{name}": size for name, size in text.pop("per_layer_config")["1"].items()}
    rotary = text.pop("rope_parameters")
    text |= {"rope_theta": rotary["indexed_attention"]["rope_theta"]}
    own |= {"swa_rope_theta": rotary["sliding_attention"]["rope_theta"]}
    text |= {"moe_layer_freq": [0, 1, 0, 1], "sliding_window_size": text.pop("sliding_window")}
    text["moe_shared_expert_intermediate_size"] = text.pop("shared_experts_intermediate_size")
    text["layer_types"] = ["full_attention", "sliding_attention"] * 2
    gone = ("mlp_layer_types", "model_type")
    said = {key: value for key, value in text.items() if key not in gone}
    path.write_text(json.dumps(said | own | config))
    ahead = {"model.layers.4.input_layernorm.weight": torch.full((32,), torch.nan)}
    tensors = read_tensors(folder)
    save_file(tensors | ahead, folder / "model.safetensors", metadata={"format": "pt"})
    model = oracle.load(folder)
    assert model.config.text_config.layer_types[0] == "indexed_attention"
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7)


def test_nemotron_as_released_files_spell_it(tmp_path: Path) -> None:
    """Layers by letters, and others behind the last one that guess further tokens ahead."""
    folder = tiny.write_checkpoint(tmp_path, "nemotron_h")
    tiny.edit_config(
        folder,
        layers_block_type=None,
        hybrid_override_pattern="MEM*E",
        num_hidden_layers=5,
        mtp_hybrid_override_pattern="*E",
        num_nextn_predict_layers=1,
        time_step_limit=[0.0, float("inf")],
    )
    model = oracle.load(folder)
    tensors = read_tensors(folder)
    assert "backbone.layers.4.mixer.experts.7.up_proj.weight" in tensors
    ahead = {"mtp.layers.0.mixer.q_proj.weight": torch.ones(3, 5)}
    save_file(tensors | ahead, folder / "model.safetensors")
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7)


@pytest.mark.parametrize("released", ["Nano_Omni", "Super_Omni", "Omni"])
def test_nemotron_omni_as_it_is_released(released: str, tmp_path: Path) -> None:
    """Its text in an object of another name, whichever class its own code has."""
    folder = tiny.write_checkpoint(tmp_path, "nemotron_h_omni")
    model = oracle.load(folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    architecture = f"NemotronH_{released}_Reasoning_V3"
    tiny.edit_config(
        folder,
        architectures=[architecture],
        model_type=architecture if released == "Nano_Omni" else "nemotron_h_omni",
        llm_config=text | {"layer_types": None, "hybrid_override_pattern": "MEM*E"},
        text_config=None,
    )
    heard = {"sound_encoder.encoder.layers.0.norm_out.weight": torch.full((7,), torch.nan)}
    save_file(read_tensors(folder) | heard, folder / "model.safetensors")
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7)


def test_longcat_needs_no_matrices_of_what_computes_nothing(tmp_path: Path) -> None:
    """transformers writes and wants some. Layers that guess further tokens ahead are left alone."""
    folder = tiny.write_checkpoint(tmp_path, "longcat_flash")
    model = oracle.load(folder)
    idle = tuple(f".experts.{expert}." for expert in range(7, 11))
    tensors = {
        name: tensor
        for name, tensor in read_tensors(folder).items()
        if not any(each in name for each in idle)
    }
    ahead = {"model.mtp.layers.0.eh_proj.weight": torch.ones(3, 5)}
    save_file(tensors | ahead, folder / "model.safetensors")
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7)


def test_llama_without_chunks_sees_everything(tmp_path: Path) -> None:
    """Where no ``layer_types`` say otherwise."""
    folder = tiny.write_checkpoint(tmp_path, "llama4_text")
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"attention_chunk_size": None}
    del config["layer_types"]
    path.write_text(json.dumps(config))
    assert_as_transformers(Driver(folder), slice_tokens=7)


def test_rope_as_released_files_of_dbrx_spell_it(tmp_path: Path) -> None:
    """``rope_theta`` in ``attn_config`` alone, where transformers 5 does not look."""
    folder = tiny.write_checkpoint(tmp_path, "dbrx")
    model = oracle.load(folder)
    assert model.config.rope_parameters["rope_theta"] == 5000.0
    tiny.edit_config(folder, rope_parameters=None)
    assert_as_transformers(Driver(folder), model=model)


def test_yarn_as_released_files_of_sarvam_spell_it(tmp_path: Path) -> None:
    """Under the name of DeepSeek's code, beside sizes that other code reads."""
    folder = tiny.write_checkpoint(tmp_path, "sarvam_mla")
    path = folder / "config.json"
    yarn = json.loads(path.read_text())["rope_parameters"]
    theta = yarn.pop("rope_theta")
    del yarn["rope_type"]
    tiny.edit_config(
        folder,
        architectures=["SarvamMLAForCausalLM"],
        rope_parameters=None,
        rope_theta=theta,
        rope_scaling=yarn | {"type": "deepseek_yarn"},
        head_dim=28,
        q_head_dim=14,
    )
    model = oracle.load(folder)
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert_as_transformers(Driver(folder), model=model)


def test_released_files_of_axk1_correct_no_choice_and_hold_norms_that_are_not_used(
    tmp_path: Path,
) -> None:
    folder = tiny.write_checkpoint(tmp_path, "axk1")
    tensors = {
        name: tensor for name, tensor in read_tensors(folder).items() if "correction" not in name
    }
    norm = "model.layers.{}.post_mlp_layernorm.weight"
    tensors[norm.format(1)] = 3 * tensors[norm.format(0)]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_as_transformers(Driver(folder), slice_tokens=7)
    del tensors[norm.format(0)]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.post_mlp_layernorm"):
        Driver(folder)


def test_layers_of_mimo_as_released_files_spell_them(tmp_path: Path) -> None:
    """A window without the token itself, no factor of weights, and rotary parameters that
    transformers takes for granted."""
    folder = tiny.write_checkpoint(tmp_path, "mimo_v2_flash")
    tiny.edit_config(
        folder,
        rope_parameters=None,
        routed_scaling_factor=None,
        sliding_window=5,
        sliding_window_size=5,
        rope_theta=70.0,
        swa_rope_theta=60.0,
    )
    model = oracle.load(folder)
    assert model.config.sliding_window == 6
    assert model.config.rope_parameters["full_attention"]["rope_theta"] == 5e6
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7)


def test_step_as_it_is_released(tmp_path: Path) -> None:
    """The text alone, with keys of its own, those that transformers passes over, and lists that go
    on for layers which foretell tokens."""
    lists = {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "partial_rotary_factors": [0.6, 1.0] * 2,
        "rope_theta": [300.0, 20.0] * 2,
        "swiglu_limits": [0.0, 0.0, 0.6, 0.9],
        "swiglu_limits_shared": [0.5, 0.8, 0.0, 0.4],
    }
    rotary = {"rope_parameters": None, "rope_scaling": ROPES["llama3"]}
    folder = tiny.write_checkpoint(
        tmp_path, "step3p7", **lists, **rotary, query_pre_attn_scalar=None
    )
    model = oracle.load(folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    names = {
        "n_routed_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "num_key_value_heads": "num_attention_groups",
    }
    sizes = {names.get(key, key): value for key, value in text.items() if type(value) is int}
    gone = dict.fromkeys(["num_sliding_attention_heads", "query_pre_attn_scalar"])
    more = {key: [*each, each[1]] for key, each in lists.items()}
    (folder / "config.json").write_text("{}")
    tiny.edit_config(
        folder,
        **{**sizes, **gone, **more, **rotary, "num_nextn_predict_layers": 1},
        architectures=["Step3p5ForCausalLM"],
        model_type="step3p5",
        attention_other_setting={
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 10,
        },
        moe_layers_enum="1,2,3,4",
        moe_router_activation="sigmoid",
        moe_router_scaling_factor=1.7,
        need_fp32_gate=True,
        norm_expert_weight=True,
        rms_norm_eps=text["rms_norm_eps"],
        torch_dtype="float32",
        use_head_wise_attn_gate=True,
        use_rope_layers=[],
        yarn_only_types=["full_attention"],
        zero_centered=True,
    )
    tensors = {name: each for name, each in read_tensors(folder).items() if "vi" not in name}
    of_last = {name for name in tensors if ".layers.3." in name}
    tensors |= {
        name.replace(".layers.3.", ".layers.4."): torch.full_like(tensors[name], torch.nan)
        for name in of_last
    }
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7)


def test_long_factors_and_scales_are_for_long_sequences(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the code of Phi-3.5-MoE has it; transformers 5 forgets to say how long a sequence is. One
    of them becomes long as it is answered."""
    from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding as Rotary

    forward = Rotary.forward

    def knowing(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        usual = ROPE_INIT_FUNCTIONS["longrope"]
        self.rope_init_fn = partial(usual, seq_len=int(position_ids.max()) + 1)
        return forward(self, x, position_ids)

    parameters = {"rope_theta": 5000.0, "short_mscale": 1.1, "long_mscale": 1.4}
    folder = tiny_checkpoint("phimoe", rope_parameters=ROPES["longrope"] | parameters)
    model = oracle.load(folder)
    prompts = oracle.prompts(lengths=(5, 30, 40))
    forgetful = [oracle.greedy(model, prompt, 6)[0] for prompt in prompts]
    monkeypatch.setattr(Rotary, "forward", knowing)
    assert_as_transformers(Driver(folder), 6, model=model, prompts=prompts, slice_tokens=7)
    assert forgetful != [oracle.greedy(model, prompt, 6)[0] for prompt in prompts]


@pytest.mark.parametrize(
    ("kind", "others"),
    [("dynamic", {"alpha": 30.0}), ("longrope", {"short_mscale": 1.2, "long_mscale": 1.5})],
)
def test_rotary_parameters_of_other_families_are_passed_over(
    kind: str, others: dict[str, float], tiny_checkpoint: Checkpoint
) -> None:
    """Those of Hunyuan and of Phi-3.5-MoE."""
    parameters = {"rope_theta": 5000.0, **ROPES[kind], **others}
    folder = tiny_checkpoint(
        "mixtral", head_dim=8, max_position_embeddings=128, rope_parameters=parameters
    )
    assert_as_transformers(Driver(folder), 4)


def test_tied_in_config_but_another_head_in_file(tmp_path: Path) -> None:
    """transformers then believes the file; so do we."""
    folder = tiny.write_checkpoint(tmp_path, "olmoe")
    tiny.edit_config(folder, tie_word_embeddings=True)
    assert_as_transformers(Driver(folder))


def assert_as_transformers(
    driver: Driver,
    num_new: int = NUM_NEW,
    *,
    model: Any = None,
    prompts: list[list[int]] | None = None,
    **cuts: int,
) -> None:
    """Greedy answers to prompts in such cuts are those of a model, or of the driver's folder."""
    model = oracle.load(driver.folder) if model is None else model
    for seq in driver.generate(prompts or oracle.prompts(), num_new, **cuts):
        assert_same(seq, *oracle.greedy(model, seq.prompt, num_new))


def assert_same(seq: Seq, tokens: list[int], logits: torch.Tensor) -> None:
    """Same tokens, and logits that differ by rounding only: by 3e-6 in the mean, most of them. One
    sequence of Qwen3.5 multiplies rounding; there transformers is 5e-4 from itself in float64."""
    assert seq.answer == tokens
    ours = torch.stack(seq.logits)
    torch.testing.assert_close(ours, logits, rtol=1e-3, atol=5e-3)
    assert (ours - logits).abs().mean() < 2e-4
