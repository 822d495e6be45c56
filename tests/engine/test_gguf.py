"""GGUF resident and streamed, against transformers with the decoded weights."""

from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebatch.checkpoint.model_files import open_model
from moebatch.errors import CheckpointError
from moebatch.layout.footprint import slot_bytes
from moebatch.layout.scratch import needs_matrix
from tests.engine.test_engine import policy, requests, run, tokens_of
from tests.gguf_models import HYBRID, LATENT, RECURRENT, Types, divisors, write_gguf
from tests.model.oracle import greedy_answers, load
from tests.packing.test_pack import packed
from tests.quantised import decoded_beside

NEW_TOKENS = 5
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
WIDTHS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 512},
    "llama4_text": {
        "intermediate_size": 256,
        "intermediate_size_mlp": 512,
        "num_hidden_layers": 4,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
    },
    "qwen2_moe": {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 256},
    "qwen3_moe": {"moe_intermediate_size": 256, "norm_topk_prob": True},
    "qwen3_vl_moe": {"moe_intermediate_size": 256, "mlp_only_layers": []},
    "olmoe": {"intermediate_size": 256},
    "glm4_moe": {
        "moe_intermediate_size": 256,
        "intermediate_size": 512,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
    },
    "minimax_m2": {"intermediate_size": 256},
    "gpt_oss": {"intermediate_size": 256, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    "deepseek_v2": {"qk_nope_head_dim": 32, "kv_lora_rank": 64, "moe_intermediate_size": 256},
    "deepseek_v3": {"q_lora_rank": None, "moe_intermediate_size": 256},
    "glm4_moe_lite": {"qk_nope_head_dim": 32, "moe_intermediate_size": 256},
    "mistral3": {
        "qk_nope_head_dim": 32,
        "moe_intermediate_size": 256,
        "rope_parameters": YARN
        | {"mscale": 0.7, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.1},
    },
    "dots1": {"moe_intermediate_size": 256, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_intermediate_size": 256, "moe_norm_min": 1e-12},
    "granitemoe": {"intermediate_size": 256},
    "granitemoeshared": {"intermediate_size": 256},
    "hunyuan_v1_moe": {"intermediate_size": 256},
    "gemma4_text": {
        "moe_intermediate_size": 256,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granitemoehybrid": {
        "intermediate_size": 256,
        "mamba_n_heads": 8,
        "layer_types": ["mamba", "attention"],
    },
    "jamba": {"intermediate_size": 256},
    "nemotron_h": {
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
        "mamba_head_dim": 40,
        "n_group": 1,
        "topk_group": 1,
    },
    "lfm2_moe": {
        "moe_intermediate_size": 256,
        "routed_scaling_factor": 1.0,
        "layer_types": ["conv", "full_attention"],
    },
    "kimi_linear": {
        "moe_intermediate_size": 256,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "linear_head_dim": 64,
        "linear_num_heads": 4,
        "num_hidden_layers": 3,
    },
    "glm_moe_dsa": {"qk_nope_head_dim": 32, "moe_intermediate_size": 256, "index_head_dim": 32},
    "solar_open": {"moe_intermediate_size": 256},
    "glm4v_moe": {"moe_intermediate_size": 256},
    "exaone_moe": {"moe_intermediate_size": 256},
    "afmoe": {
        "moe_intermediate_size": 256,
        "num_hidden_layers": 4,
        "global_attn_every_n_layers": 4,
    },
    "mimo_v2_flash": {
        "moe_intermediate_size": 256,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 4 / 7}
            for kind, base in (("full_attention", 300.0), ("sliding_attention", 20.0))
        },
    },
    "phimoe": {"intermediate_size": 256, "router_jitter_noise": 0.01},
    "step3p7": {
        "moe_intermediate_size": 256,
        "share_expert_dim": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "query_pre_attn_scalar": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    },
    "dbrx": {
        "d_model": 256,
        "ffn_config": {"ffn_hidden_size": 256, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "qwen3_next": {"moe_intermediate_size": 256, "linear_value_head_dim": 64},
    "qwen3_5_moe_text": {"moe_intermediate_size": 256, "linear_value_head_dim": 64},
}
DELTA_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
SCALED: dict[str, dict[str, Any]] = {
    "gpt_oss": YARN | {"truncate": False},
    "qwen3_moe": YARN | {"attention_factor": 1.25},
    "deepseek_v2": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "mixtral": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
PLAIN = ("F32", "F16", "BF16")
TYPES = (*PLAIN, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def as_released(name: str) -> str:
    """Q4_K_M: some matrices have more bits than others."""
    is_wide = "blk.0" in name and ("down" in name or "attn_v" in name)
    return "Q6_K" if is_wide or name == "output.weight" else "Q4_K"


def as_ternary(name: str) -> str:
    """One matrix has a type that kernels leave to torch."""
    return "TQ2_0" if "down" in name else "Q4_K"


MIXES: dict[str, Types] = {"released": as_released, "ternary": as_ternary}


@pytest.fixture
def written(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def write(
        types: Types | str,
        family: str = "mixtral",
        config: dict[str, Any] | None = None,
        folder: str = "model",
        **options: Any,
    ) -> Path:
        own = DELTA_LAYERS if family in RECURRENT else {}
        sizes = {"hidden_size": 256, "num_hidden_layers": 2} | WIDTHS[family] | own
        plain = tiny_checkpoint(family, **sizes | (config or {}))
        kinds = (lambda name: types) if isinstance(types, str) else types
        return write_gguf(plain, tmp_path / folder, kinds, **options)

    return write


def open_tensors(path: Path) -> Collection[str]:
    """Names of all."""
    return open_model(path, "auto").checkpoint.tensors


def require_tokens_of_transformers(folder: Path, path: Path, resident: float) -> None:
    rows = requests((1, 33, 7, 12))
    model = load(decoded_beside(folder))
    expected = greedy_answers(model, rows, NEW_TOKENS)
    assert tokens_of(run(path, policy(resident=resident), rows, dtype="float32")) == expected


@pytest.mark.few(10)
@pytest.mark.parametrize("family", WIDTHS)
@pytest.mark.parametrize("kind", [*TYPES, "IQ4_XS", "IQ3_S", "IQ2_XXS", *MIXES])
def test_tokens_are_those_of_the_decoded_weights(
    kind: str, family: str, written: Callable[..., Path]
) -> None:
    folder = written(MIXES.get(kind, kind), family)
    require_tokens_of_transformers(folder, folder / "model.gguf", float("K" in kind))


@pytest.mark.parametrize("family", SCALED)
def test_positions_are_scaled_as_in_the_model(family: str, written: Callable[..., Path]) -> None:
    folder = written("F32", family, {"rope_parameters": SCALED[family]})
    found = open_model(folder, "auto").config["rope_parameters"]
    assert {key: found[key] for key in SCALED[family]} == pytest.approx(SCALED[family], abs=1e-6)
    require_tokens_of_transformers(folder, folder, 0.0)


@pytest.mark.parametrize(("num_experts", "norms"), [(16, True), (128, False)])
def test_maverick_is_known_by_its_experts(
    num_experts: int, norms: bool, written: Callable[..., Path]
) -> None:
    """Which does not norm queries and keys, as no key of a file says."""
    sizes = {"num_local_experts": num_experts, "intermediate_size": 8, "hidden_size": 32}
    folder = written("F32", "llama4_text", sizes | {"use_qk_norm": norms})
    require_tokens_of_transformers(folder, folder, 0.0)


def test_llama_4_attends_in_chunks(written: Callable[..., Path]) -> None:
    folder = written("F32", "llama4_text", metadata={"attention.sliding_window": 0})
    with pytest.raises(CheckpointError, match="layers do not attend in chunks, which is not read"):
        open_model(folder, "auto")


@pytest.mark.parametrize("family", ["mixtral", "llama4_text"])
def test_frequencies_are_divided_by_a_tensor(family: str, written: Callable[..., Path]) -> None:
    folder = written("F32", family, {"rope_parameters": LLAMA3})
    divided = open_model(folder, "auto").config["rope_parameters"]["short_factor"]
    assert divided[0] == 1 and divided[-1] == 8 and any(1 < each < 8 for each in divided)
    require_tokens_of_transformers(folder, folder, 0.0)


def test_frequencies_of_phi_are_divided_as_rows_are_long(written: Callable[..., Path]) -> None:
    """Those of longer rows transformers does not take."""
    rotary = {
        "rope_type": "longrope",
        "rope_theta": 5000.0,
        "original_max_position_embeddings": 64,
        "long_factor": [float(1 + n) for n in range(32)],
        "short_factor": [1 + n / 32 for n in range(32)],
        "long_mscale": 1.243163121016122,
        "short_mscale": 1.243163121016122,
    }
    folder = written("F32", "phimoe", {"rope_parameters": rotary, "sliding_window": 131072})
    assert open_model(folder, "auto").config["rope_parameters"] == rotary
    require_tokens_of_transformers(folder, folder, 0.0)


@pytest.mark.parametrize("is_older", [False, True])
def test_frequencies_of_step_are_divided_where_half_of_a_head_rotates(
    is_older: bool, written: Callable[..., Path]
) -> None:
    """Older converters took all of it to rotate."""
    half = divisors(LLAMA3, 16)
    factors = divisors(LLAMA3, 32) if is_older else np.append(half, np.ones_like(half))
    rotary = {
        "full_attention": LLAMA3 | {"partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    }
    config = {"rope_parameters": rotary, "head_dim": 32}
    folder = written("F32", "step3p7", config, factors={"rope_freqs.weight": factors})
    found = open_model(folder, "auto").config["rope_parameters"]["full_attention"]
    assert found["short_factor"] == half.tolist()
    require_tokens_of_transformers(folder, folder, 0.0)


@pytest.mark.parametrize("family", ["glm4_moe", *RECURRENT])
def test_all_of_a_head_may_rotate_where_usually_a_part_does(
    family: str, written: Callable[..., Path]
) -> None:
    parameters = {"rope_theta": 5000.0, "partial_rotary_factor": 1.0}
    folder = written("F32", family, {"rope_parameters": parameters})
    require_tokens_of_transformers(folder, folder, 0.0)


@pytest.mark.parametrize("family", [*LATENT, "kimi_linear", "qwen3_next"])
def test_older_files_hold_projections_whole(family: str, written: Callable[..., Path]) -> None:
    folder = written("Q8_0", family, older=True)
    whole = "ssm_in.weight" if family in RECURRENT else "attn_kv_b.weight"
    names = [name.partition(".")[2].partition(".")[2] for name in open_tensors(folder)]
    assert whole in names and not {"attn_k_b.weight", "attn_gate.weight"} & {*names}
    require_tokens_of_transformers(folder, folder, 0.0)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_gates_of_experts_may_lie_above_what_they_gate(
    family: str, written: Callable[..., Path]
) -> None:
    folder = written("Q8_0", family, joined=True)
    assert "blk.0.ffn_gate_up_exps.weight" in open_tensors(folder)
    require_tokens_of_transformers(folder, folder, 0.0)


@pytest.mark.parametrize(
    ("num_experts", "groups"), [(256, (8, 4)), (160, (8, 3)), (64, (1, 1)), (384, (1, 1))]
)
def test_files_without_groups_are_known_by_their_experts(
    num_experts: int, groups: tuple[int, int], written: Callable[..., Path]
) -> None:
    config = {"n_routed_experts": num_experts, "n_group": 1, "topk_group": 1, "hidden_size": 32}
    sizes = {"moe_intermediate_size": 4, "num_experts_per_tok": 2}
    folder = written("F32", "deepseek_v3", config | sizes, left_out=("expert_group_",))
    found = open_model(folder, "auto").config
    assert (found["n_group"], found["topk_group"]) == groups


def test_files_that_do_not_say_how_gates_score_show_it_by_their_correction(
    written: Callable[..., Path],
) -> None:
    left_out = ("expert_gating_func",)
    shapes = {
        family: open_model(written("F32", family, left_out=left_out, folder=family), "auto").shape
        for family in ("deepseek_v2", "deepseek_v3")
    }
    assert shapes["deepseek_v2"].router.scores == "softmax"
    assert shapes["deepseek_v3"].router.scores == "sigmoid"


def test_queries_with_a_temperature_are_refused(written: Callable[..., Path]) -> None:
    folder = written("F32", "deepseek_v3", metadata={"attention.temperature_scale": 0.1})
    with pytest.raises(CheckpointError, match="queries have a temperature"):
        open_model(folder, "auto")


@pytest.mark.parametrize(("scale", "length"), [(0.2, 16), (0.1, 17)])
def test_queries_of_mistral_4_have_the_temperature_of_released_models(
    scale: float, length: int, written: Callable[..., Path]
) -> None:
    """Files leave it out."""
    said = {"attention.temperature_scale": scale, "attention.temperature_length": length}
    folder = written("F32", "mistral3", metadata=said)
    with pytest.raises(CheckpointError, match=r"temperature of queries is .*, expected .*: 16"):
        open_model(folder, "auto")


@pytest.mark.parametrize(
    ("family", "flag"),
    [
        ("qwen3_moe", "attention_bias"),
        ("ernie4_5_moe", "use_bias"),
        ("deepseek_v3", "attention_bias"),
        ("qwen3_next", "attention_bias"),
        ("lfm2_moe", "conv_bias"),
        ("granitemoehybrid", "mamba_proj_bias"),
    ],
)
def test_biases_that_are_not_read_are_refused(
    family: str, flag: str, written: Callable[..., Path]
) -> None:
    folder = written("F32", family, {flag: True})
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.\d.*\.bias' is a bias that is not"):
        open_model(folder, "auto")


@pytest.mark.parametrize("left_out", [(), ("rope.scaling.finetuned",)])
def test_granite_hybrids_rotate_unless_a_file_says_that_they_do_not(
    left_out: tuple[str, ...], written: Callable[..., Path]
) -> None:
    config = {"position_embedding_type": "rope"}
    folder = written("F32", "granitemoehybrid", config, left_out=left_out)
    require_tokens_of_transformers(folder, folder, 0.0)


@pytest.mark.parametrize("trimmed", [False, True])
def test_vectors_and_matrices_may_have_more_dimensions(
    trimmed: bool, written: Callable[..., Path]
) -> None:
    """Convolutions of queries, keys and values have four, and what heads fade by."""
    folder = written("Q8_0", "kimi_linear", {"q_lora_rank": 32}, trimmed=trimmed)
    require_tokens_of_transformers(folder, folder, 0.0)


@pytest.mark.parametrize("trimmed", [False, True])
def test_norms_of_one_group_may_be_matrices(trimmed: bool, written: Callable[..., Path]) -> None:
    config = {"mamba_n_groups": 1, "mamba_conv_bias": False}
    folder = written("Q8_0", "granitemoehybrid", config, trimmed=trimmed)
    require_tokens_of_transformers(folder, folder, 0.0)


@pytest.mark.parametrize(
    ("heads", "why"),
    [
        (2, "is 2, expected a number for each layer, 0 where it does not attend"),
        ([0, 0], r"is \[0, 0\], expected one number of at least 1 wherever a layer attends"),
        ([2, 1], r"is \[2, 1\], expected one number of at least 1 wherever a layer attends"),
    ],
)
@pytest.mark.parametrize("family", HYBRID)
def test_which_layers_recur_must_be_clear(
    family: str, heads: int | list[int], why: str, written: Callable[..., Path]
) -> None:
    folder = written("F32", family, metadata={"attention.head_count_kv": heads})
    with pytest.raises(CheckpointError, match=why):
        open_model(folder, "auto")


def test_layers_of_jamba_come_in_turns(written: Callable[..., Path]) -> None:
    """Of its configuration, too, which says one of how many it is."""
    four = {"num_hidden_layers": 4}
    folder = written("F32", "jamba", four | {"expert_layer_offset": 1})
    found = open_model(folder, "auto").config
    assert (found["attn_layer_offset"], found["expert_layer_offset"]) == (1, 1)
    assert (found["attn_layer_period"], found["expert_layer_period"]) == (5, 2)
    require_tokens_of_transformers(folder, folder, 0.0)
    uneven = {"attention.head_count_kv": [0, 2, 2, 0]}
    folder = written("F32", "jamba", four, "uneven", metadata=uneven)
    with pytest.raises(CheckpointError, match=r"layers \[1, 2\] of 4 \(attn_layer\) do not come"):
        open_model(folder, "auto")


def test_layers_of_nemotron_that_guess_ahead_are_passed_over(written: Callable[..., Path]) -> None:
    """Files have them behind the last one, as a layer that attends and has experts."""
    heads, widths = [0, 0, 0, 2, 0, 2], [0, 256, 0, 0, 256, 256]
    behind = {"block_count": 6, "nextn_predict_layers": 1}
    by_layer = {"attention.head_count_kv": heads, "feed_forward_length": widths}
    folder = written("F32", "nemotron_h", metadata=behind | by_layer)
    require_tokens_of_transformers(folder, folder, 0.0)


def test_experts_of_nemotron_may_see_latents(written: Callable[..., Path]) -> None:
    folder = written("Q8_0", "nemotron_h", {"moe_latent_size": 64})
    require_tokens_of_transformers(folder, folder, 0.0)


def test_layers_of_nemotron_say_what_they_are(written: Callable[..., Path]) -> None:
    folder = written("F32", "nemotron_h", metadata={"feed_forward_length": 256})
    why = "is 256, expected a number for each layer, 0 where it has no experts"
    with pytest.raises(CheckpointError, match=f"nemotron_h_moe.feed_forward_length {why}"):
        open_model(folder, "auto")


def test_states_are_a_multiple_of_hidden_states(written: Callable[..., Path]) -> None:
    folder = written("F32", "granitemoehybrid", metadata={"ssm.inner_size": 511})
    with pytest.raises(CheckpointError, match=r"is 511, expected a multiple of embedding_length"):
        open_model(folder, "auto")


def test_formats_differ_from_weight_to_weight(written: Callable[..., Path]) -> None:
    files = open_model(written(as_released), "auto")
    assert [str(each) for each in files.experts.formats_of(0, 3)] == [
        "gguf q4_k",
        "gguf q4_k",
        "gguf q6_k",
    ]
    assert str(files.dtypes.stored) == "gguf q4_k and gguf q6_k"
    records = files.expert_records().values()
    stored = [sum(place.num_bytes for place in record.places) for record in records]
    assert files.dtypes.expert_bytes(files.shape) == pytest.approx(sum(stored) / len(stored), abs=1)
    assert files.dtypes.largest_expert_bytes(files.shape) == max(stored)
    assert max(record.num_bytes for record in records) <= slot_bytes(files.shape, files.dtypes)
    assert not files.warnings


@pytest.mark.parametrize(("mix", "has_room"), [("released", False), ("ternary", True)])
def test_room_is_made_where_some_formats_are_left_to_torch(
    mix: str, has_room: bool, written: Callable[..., Path]
) -> None:
    files = open_model(written(MIXES[mix]), "float32")
    stored = files.dtypes.stored
    assert needs_matrix(stored, "float32", "portable") == has_room
    names = {"released": {"gguf q4_k", "gguf q6_k"}, "ternary": {"gguf q4_k", "gguf tq2_0"}}
    assert {each.name for each, _ in stored.shares} == names[mix]
    sizes = Counter[str]()
    for layer in files.shape.moe_layers:
        for expert in range(files.shape.num_experts):
            for weight in files.expert_weights(layer, expert):
                sizes[weight.format.name] += sum(part.num_bytes for part in weight.extents)
    for each, share in stored.shares:
        assert share == pytest.approx(sizes[each.name] / sizes.total())


def test_several_files_are_one_model(written: Callable[..., Path]) -> None:
    folder = written("Q8_0", split=9)
    first, *others = sorted(folder.glob("*.gguf"))
    assert others and first.name.startswith("model-00001-of-")
    require_tokens_of_transformers(folder, folder, 0.0)
    others[0].unlink()
    with pytest.raises(CheckpointError, match=f"file '{others[0].name}' is missing"):
        open_model(first, "auto")


def test_files_in_another_order_are_refused(written: Callable[..., Path]) -> None:
    folder = written("Q8_0", split=9)
    first, second, *_ = sorted(folder.glob("*.gguf"))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    why = r"00001-of-.*: says that it is file 2 of \d, and its name that it is file 1"
    with pytest.raises(CheckpointError, match=why):
        open_model(first, "auto")
    alone = folder / "alone.gguf"
    alone.write_bytes(contents[0])
    why = r"alone\.gguf: says that it is file 1 of \d, and its name that it is file 1 of 1"
    with pytest.raises(CheckpointError, match=why):
        open_model(alone, "auto")


def test_files_of_several_models_are_refused(written: Callable[..., Path]) -> None:
    folder = written("Q8_0", split=9)
    tied = written("Q8_0", config={"tie_word_embeddings": True}, folder="tied", split=9)
    last, other = max(folder.glob("*.gguf")), max(tied.glob("*.gguf"))
    assert last.name == other.name
    last.write_bytes(other.read_bytes())
    with pytest.raises(CheckpointError, match=r"hold \d+ tensors, of \d+ that the first says"):
        open_model(folder, "auto")


@pytest.mark.parametrize("family", ["jamba", "mimo_v2_flash"])
def test_there_are_not_more_layers_than_tensors(family: str, written: Callable[..., Path]) -> None:
    folder = written("F32", family, metadata={"block_count": 2**32 - 1})
    with pytest.raises(CheckpointError, match=r"block_count is 4294967295, of \d+ tensors"):
        open_model(folder, "auto")


def test_experts_of_the_first_files_of_mixtral_lie_one_by_one(written: Callable[..., Path]) -> None:
    folder = written(as_released, apart=True)
    assert not open_model(folder, "auto").experts.is_stacked
    require_tokens_of_transformers(folder, folder, 0.0)


def test_what_is_missing_is_not_counted_among_formats(written: Callable[..., Path]) -> None:
    path = written(lambda name: "F16" if "down" in name else "Q8_0") / "model.gguf"
    with pytest.raises(CheckpointError, match=r"several formats \(float16; gguf q8_0\)"):
        open_model(path, "auto")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_gate_exps", b"blk.9.ffn_gate_exps"))
    with pytest.raises(CheckpointError, match="3 of 5 weights of experts are gguf q8_0, 2 in"):
        open_model(path, "auto")


def test_gguf_is_not_packed(written: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="have names and an order of their own"):
        packed(written("F16"), tmp_path / "small")


def test_heads_of_mimo_must_be_those_of_both_kinds(written: Callable[..., Path]) -> None:
    folder = written("F32", "mimo_v2_flash", metadata={"attention.head_count_kv": [1, 1]})
    why = r"mimo2\.attention\.head_count_kv is \[1, 1\], expected twice as many in layers that"
    with pytest.raises(CheckpointError, match=why):
        open_model(folder, "auto")


def test_files_of_mimo_say_how_many_heads_layers_have(written: Callable[..., Path]) -> None:
    folder = written("F32", "mimo_v2_flash", left_out=("attention.head_count_kv",))
    with pytest.raises(CheckpointError, match=r"head_count_kv is null, expected numbers of heads"):
        open_model(folder, "auto")


@pytest.mark.parametrize("family", ["exaone_moe", "mimo_v2_flash", "gemma4_text"])
def test_files_say_which_layers_slide(family: str, written: Callable[..., Path]) -> None:
    folder = written("F32", family, left_out=("attention.sliding_window_pattern",))
    with pytest.raises(CheckpointError, match=r"attention\.sliding_window_pattern is missing"):
        open_model(folder, "auto")


@pytest.mark.parametrize("left_out", [(), ("attention.indexer.types",)])
def test_layers_of_glm_5_may_share_what_they_choose(
    left_out: tuple[str, ...], written: Callable[..., Path]
) -> None:
    types = ["full", "shared", "full"]
    config = {"indexer_types": types, "num_hidden_layers": 3}
    folder = written("F32", "glm_moe_dsa", config, left_out=left_out)
    assert open_model(folder, "auto").config["indexer_types"] == types
    require_tokens_of_transformers(folder, folder, 0.0)
