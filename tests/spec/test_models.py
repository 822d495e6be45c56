"""Models to plan for: those that come with moebatch, and files that a user writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from moebatch.errors import CheckpointError, ConfigError, Fault
from moebatch.spec.files.library import find, names
from moebatch.spec.model.models import load_model
from moebatch.spec.model.named_formats import named_format
from moebatch.spec.model.recurrence import ChannelDelta, GatedDelta
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape
from tests.shapes import stored_bytes

BILLIONS = {
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "dbrx": 131.6,
    "phi-3.5-moe": 41.9,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen2-57b-a14b": 57.4,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
    "qwen3-next-80b-a3b": 79.7,
    "qwen3.5-35b-a3b": 34.7,
    "olmoe-1b-7b": 6.92,
    "flexolmo-7x7b": 33.3,
    "deepseek-moe-16b": 16.4,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "deepseek-v3.2": 671,
    "deepseek-v4-flash": 284,
    "glm-5": 744,
    "a.x-k1": 519,
    "a.x-k2-light": 20.3,
    "glm-4.5-air": 106,
    "glm-4.5": 355,
    "glm-4.5v": 107,
    "minimax-m2": 230,
    "minimax-m3": 426,
    "minimax-text-01": 456,
    "kimi-k2": 1026,
    "kimi-k2.5": 1026,
    "mimo-v2-flash": 309,
    "step-3.5-flash": 197,
    "laguna-xs.2": 33.2,
    "kimi-linear-48b-a3b": 49.1,
    "ling-3.0-flash": 124,
    "ling-lite-1.5": 16.8,
    "ling-mini-2.0": 16.3,
    "ling-flash-2.0": 103,
    "kolibri-1": 78.1,
    "aria": 24.9,
    "qwen3-omni-30b-a3b": 30.5,
    "longcat-flash-chat": 560,
    "beam-1.0-501b-a23b": 501,
    "glm-4.7-flash": 29.9,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "ernie-4.5-21b-a3b": 21.8,
    "ernie-4.5-300b-a47b": 299,
    "ernie-4.5-vl-28b-a3b": 21.8,  # experts for images are not counted
    "granite-3.1-3b-a800m": 3.30,
    "hunyuan-a13b": 80.4,
    "hy3-preview": 295,
    "glm-5.3-flash": 313,
    "hy4": 770,
    "hy4-preview": 58.2,
    "dots.llm1": 142.8,
    "dots3-note-prev": 280,
    "solar-open-100b": 102.6,
    "k-exaone-236b-a23b": 236,
    "sarvam-30b": 32.2,
    "sarvam-105b": 106,
    "qwen3-vl-30b-a3b": 30.5,
    "trinity-mini": 26.1,
    "lfm2-8b-a1b": 8.34,
    "granite-4.0-h-tiny": 6.94,
    "granite-4.0-h-small": 32.2,
    "jamba-1.5-mini": 51.6,
    "jamba-1.5-large": 398.6,
    "nemotron-3-nano-30b-a3b": 31.6,
    "nemotron-3-nano-omni-30b-a3b": 31.6,
    "mellum2-12b-a2.5b": 12.1,
    "mistral-small-4-119b": 119,
    "mistral-large-4-1t-a52b": 1050,
    "muse-spark-open-816b-a42b": 820,  # its name does not count embedding and head
    "gemma-4-26b-a4b": 25.2,
    "llama-4-scout": 107.8,
    "llama-4-maverick": 400.7,
    "switch-base-8": 0.62,
    "switch-base-128": 7.4,
    "switch-large-128": 26.3,
}
"""Parameters on the model cards and in the papers."""
OLMOE = """\
name: My OLMoE
source: my own
config:
  architectures: [OlmoeForCausalLM]
  hidden_size: 2048
  num_experts: 64
  rms_norm_eps: 1e-5
"""
DBRX = """\
config:
  architectures: [DbrxForCausalLM]
  d_model: 6144
  ffn_config:
    moe_num_experts: 16
    moe_top_k: 40
"""


def shape_of(name: str) -> ModelShape:
    return load_model(name).shape


def faults(tmp_path: Path, text: str) -> list[Fault]:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_model(str(path))
    assert all(fault.file == str(path) for fault in caught.value.faults)
    return list(caught.value.faults)


def fault(tmp_path: Path, text: str) -> tuple[int | None, str | None, str]:
    found = faults(tmp_path, text)
    assert len(found) == 1, found
    return found[0].line, found[0].where, found[0].message


class TestLibrary:
    def test_all_models_are_known(self) -> None:
        assert names("models") == tuple(sorted(BILLIONS))

    @pytest.mark.parametrize("name", BILLIONS)
    def test_parameters_are_those_that_are_published(self, name: str) -> None:
        entry = load_model(name)
        assert entry.shape.num_params / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
        assert entry.path == find("models", name)
        assert entry.source.startswith("config.json of ")
        assert name.replace("-", "") in entry.name.lower().replace("-", "")
        assert entry.shape.dtype == ("float32" if name.startswith("switch") else "bfloat16")

    @pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
    def test_quantised_checkpoints_are_as_large_as_published(self, name: str, gib: float) -> None:
        """Table 1 of the gpt-oss model card."""
        shape = shape_of(name)
        num_bytes = len(shape.moe_layers) * shape.num_experts * stored_bytes(shape)
        num_bytes += shape.resident_params * shape.dtype_bytes
        assert num_bytes / 2**30 == pytest.approx(gib, abs=0.05)

    @pytest.mark.parametrize("name", BILLIONS)
    def test_other_formats_take_fewer_bytes(self, name: str) -> None:
        entry = load_model(name)
        for other in entry.also_published:
            num_bytes = entry.shape.expert_bytes(named_format(other, entry.shape))
            assert num_bytes < stored_bytes(entry.shape)

    def test_windows_of_gpt_oss_alternate(self) -> None:
        assert shape_of("gpt-oss-20b").sliding_windows == (128, None) * 12

    @pytest.mark.parametrize(
        ("name", "num_bytes"),
        [
            ("mixtral-8x7b", 32 * 4096),
            ("mixtral-8x22b", 56 * 4096),
            ("dbrx", 40 * 4096),
            ("deepseek-moe-16b", 28 * 2 * 2048 * 2),
            ("deepseek-v2-lite", 27 * (512 + 64) * 2),
        ],
    )
    def test_cache_of_a_token(self, name: str, num_bytes: int) -> None:
        assert shape_of(name).kv_bytes_per_token(2) == num_bytes

    @pytest.mark.parametrize(
        ("name", "attention_bytes", "expert_bytes"),
        [
            ("mixtral-8x7b", 83_886_080, 352_321_536),
            ("mixtral-8x22b", 176_160_768, 603_979_776),
            ("dbrx", 176_160_768, 396_361_728),
        ],
    )
    def test_sizes_that_the_papers_work_with(
        self, name: str, attention_bytes: int, expert_bytes: int
    ) -> None:
        shape = shape_of(name)
        assert 2 * shape.mixer_params(0) == attention_bytes
        assert stored_bytes(shape) == 2 * shape.expert_params == expert_bytes

    def test_channels_that_fade_apart_cost_as_much_as_heads_that_do(self) -> None:
        """As kernels take it: within a tenth, steps and slices."""
        apart = shape_of("kimi-linear-48b-a3b").recurrence
        assert isinstance(apart, ChannelDelta)
        together = GatedDelta(
            num_key_heads=apart.num_key_heads,
            num_value_heads=apart.num_value_heads,
            key_head_dim=apart.key_head_dim,
            value_head_dim=apart.value_head_dim,
            conv_width=apart.conv_width,
        )
        assert apart.decode_flops == together.decode_flops
        assert apart.prompt_flops == together.prompt_flops
        assert apart.state == together.state

    def test_what_lightning_attention_keeps_follows_from_the_configuration(self) -> None:
        """A matrix of each head in seven of eight layers, and keys and values in the others."""
        shape = shape_of("minimax-text-01")
        assert shape.recurrent_layers == tuple(n for n in range(80) if n % 8 != 7)
        matrix = 128 * 128
        assert shape.state_bytes(2) == 70 * 64 * matrix * 4
        assert shape.cached_in(states="float16").state_bytes(2) == 70 * 64 * matrix * 2
        assert shape.kv_bytes_per_token(2) == 10 * 2 * 8 * 128 * 2

    def test_unknown_names_are_refused_with_near_ones(self) -> None:
        with pytest.raises(ConfigError, match=r"did you mean .*mixtral-8x7b"):
            load_model("mixtral-8x7")


class TestCheckpoints:
    CONFIG: dict[str, Any] = {"architectures": ["OlmoeForCausalLM"], "dtype": "float16"}  # noqa: RUF012

    @pytest.mark.parametrize("given", ["my-model", "my-model/config.json", "other.json"])
    def test_folders_and_files(
        self, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("my-model").mkdir()
        for path in ("my-model/config.json", "other.json"):
            Path(path).write_text(json.dumps(self.CONFIG))
        for name in (given, str(tmp_path / given)):
            entry = load_model(name)
            assert entry.name == ("other" if given == "other.json" else "my-model")
            assert entry.path.name == ("other.json" if given == "other.json" else "config.json")
            assert entry.shape == read_shape(self.CONFIG, "")

    def test_the_current_folder_has_a_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps(self.CONFIG))
        monkeypatch.chdir(tmp_path)
        assert load_model(".").name == tmp_path.name

    def test_faults_are_those_of_the_checkpoint(self, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(self.CONFIG | {"hidden_size": 0}))
        with pytest.raises(CheckpointError, match=f"{path}: hidden_size: expected a whole number"):
            load_model(str(tmp_path))

    def test_a_model_without_experts_is_refused(self, tmp_path: Path) -> None:
        dense = {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 99}
        (tmp_path / "config.json").write_text(json.dumps(dense))
        with pytest.raises(CheckpointError, match="no layer has experts"):
            load_model(str(tmp_path))

    def test_a_folder_without_a_config(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: No such file"):
            load_model(str(tmp_path))


class TestYaml:
    def test_what_a_file_says(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text(OLMOE)
        entry = load_model(str(path))
        assert (entry.name, entry.source, entry.path) == ("My OLMoE", "my own", path)
        assert entry.shape.rms_eps == 1e-5
        assert entry.shape.num_layers == 16

    def test_a_file_without_a_name_is_called_as_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text("config: {architectures: [OlmoeForCausalLM]}\n")
        entry = load_model(str(path))
        assert (entry.name, entry.source) == ("mine", "")

    @pytest.mark.parametrize(
        ("written", "shown"),
        [
            ("0", "0"),
            ("-1", "-1"),
            ("1e30", "1e+30"),
            (str(10**30), str(10**30)),
            (".nan", "nan"),
            (".inf", "inf"),
            ("'4096'", "'4096'"),
            ("4096.0", "4096.0"),
            ("true", "true"),
            ("[4096]", "[4096]"),
            ("null", "null"),
        ],
    )
    def test_absurd_sizes(self, written: str, shown: str, tmp_path: Path) -> None:
        line, where, message = fault(tmp_path, OLMOE.replace("2048", written))
        assert (line, where) == (5, "config.hidden_size")
        assert message == f"expected a whole number from 1 to 2147483647, got {shown}"

    @pytest.mark.parametrize(
        ("published", "where", "message"),
        [
            ("[fp8]", "also_published", "must be a mapping such as {fp8: Qwen/"),
            ("{fp9: a/b}", "also_published.fp9", "no format is named 'fp9'; did you mean fp8?"),
            ("{fp8: 1}", "also_published.fp8", "must be a text, got 1"),
        ],
    )
    def test_faults_in_formats(
        self, published: str, where: str, message: str, tmp_path: Path
    ) -> None:
        found = fault(tmp_path, f"also_published: {published}\n{OLMOE}")
        assert found[:2] == (1, where)
        assert found[2].startswith(message)

    def test_faults_in_nested_parts(self, tmp_path: Path) -> None:
        line, where, message = fault(tmp_path, DBRX)
        assert (line, where) == (6, "config.ffn_config.moe_top_k")
        assert message == "ffn_config.moe_top_k (40) is more than ffn_config.moe_num_experts (16)"

    def test_a_fault_of_an_absent_figure_is_shown_at_what_is_around_it(
        self, tmp_path: Path
    ) -> None:
        text = "config:\n  architectures: [DeepseekForCausalLM]\n  num_experts_per_tok: 6\n"
        line, where, message = fault(tmp_path, text)
        assert (line, where) == (1, "config.n_routed_experts")
        assert message == "expected a whole number from 1 to 2147483647, got null"

    def test_all_faults_at_once(self, tmp_path: Path) -> None:
        text = OLMOE.replace("name: My OLMoE", "name: 7\nsource: here\nsauce: ''")
        text += "  num_attention_heads: 0\n  vocab_size: 0\n"
        assert [str(each).partition(":")[2] for each in faults(tmp_path, text)] == [
            "1: name: must be a text, got 7",
            "3: sauce: unknown key; did you mean source?",
            "4: source: given twice, first in line 2",
            "10: config.num_attention_heads: expected a whole number from 1 to 2147483647, got 0",
            "11: config.vocab_size: expected a whole number from 1 to 2147483647, got 0",
        ]

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (
                "name: x\n",
                (None, "config", "must hold the figures of the model's config.json, but"),
            ),
            (
                "config: 3\n",
                (1, "config", "must hold the figures of the model's config.json, got 3"),
            ),
            (
                "config:\n",
                (1, "config", "must hold the figures of the model's config.json, but is "),
            ),
            (
                "config: {}\n",
                (1, "config.architectures", "architecture null is not supported; docs"),
            ),
            (
                "config: {architectures: [LlamaForCausalLM]}\n",
                (1, "config.architectures", "architecture 'LlamaForCausalLM' is not supported"),
            ),
            (
                OLMOE + "  quantization_config:\n    quant_method: hqq\n",
                (8, "config.quantization_config", "quantization_config ('hqq'): such checkpoints"),
            ),
            (
                OLMOE + "hidden_size: 7\n",
                (
                    8,
                    "hidden_size",
                    "unknown key; allowed are name, source, also_published, config, and figures s",
                ),
            ),
            (OLMOE.replace("my own", "' '"), (2, "source", "must be a text, got ' '")),
        ],
    )
    def test_refusals(
        self, text: str, expected: tuple[int | None, str, str], tmp_path: Path
    ) -> None:
        line, where, message = fault(tmp_path, text)
        assert (line, where) == expected[:2]
        assert message.startswith(expected[2])

    @pytest.mark.parametrize("name", ["missing/x.yaml", "a/" + "b" * 5000])
    def test_paths_that_cannot_be_read(self, name: str) -> None:
        with pytest.raises(ConfigError):
            load_model(name)


class TestQuantised:
    """What a ``config.json`` says of its weights is enough to plan."""

    @pytest.mark.parametrize(
        ("name", "quantization", "expert_bytes"),
        [
            (  # Qwen3-235B-A22B-FP8
                "qwen3-235b-a22b",
                {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
                3 * (1536 * 4096 + 12 * 32 * 4),
            ),
            ("gpt-oss-20b", {"quant_method": "mxfp4"}, (3 * 2880 * 2880 * 17) // 32 + 3 * 2880 * 2),
            (
                "qwen3-30b-a3b",
                {"quant_method": "modelopt", "quant_algo": "NVFP4"},
                3 * (768 * 2048 * 9 // 16 + 4),
            ),
            (  # zero points and scales take 20 bits, an input's group 4 bytes
                "mixtral-8x7b",
                {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
                3 * 4096 * 14336 // 2
                + (2 * 32 * 14336 + 112 * 4096) * 20 // 8
                + (2 * 4096 + 14336) * 4,
            ),
        ],
    )
    def test_bytes_of_an_expert(
        self, name: str, quantization: dict[str, Any], expert_bytes: int
    ) -> None:
        assert stored_bytes(shape_with(name, quantization)) == expert_bytes

    def test_kimi_k2_thinking(self) -> None:
        """Experts in groups of 32, its card says 594 GB in all."""
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
        group = {"targets": ["Linear"], "weights": weights | {"symmetric": True}}
        config = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "torch_dtype": "bfloat16",
            "vocab_size": 163840,
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": group},
            },
        }
        shape = read_shape(config, "config.json")
        assert stored_bytes(shape) == 3 * 7168 * 2048 * 9 // 16
        num_bytes = 60 * 384 * stored_bytes(shape) + 2 * shape.resident_params
        assert num_bytes / 1e9 == pytest.approx(594, rel=0.01)

    @pytest.mark.parametrize(
        ("quantization", "message"),
        [
            ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size: expected"),
            ({"quant_method": "fp8", "weight_block_size": 128}, "expected a list of rows and"),
            ({"quant_method": "gptq", "bits": 3}, "bits: expected 4 or 8, got 3"),
            ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size: expected a size"),
            ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: expected 'gemm'"),
            ({"quant_method": "compressed-tensors"}, "config_groups: expected groups of modules"),
            ({"quant_method": "hqq"}, "quantization_config ('hqq'): such checkpoints are not read"),
            ({"quant_method": "quark"}, "use the model in bfloat16, or quantised as FP8"),
            ({"quant_method": "bitsandbytes"}, "load_in_4bit: of bitsandbytes only 4 bits"),
        ],
    )
    def test_what_makes_no_sense_is_refused_with_its_key(
        self, quantization: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError) as caught:
            shape_with("mixtral-8x7b", quantization)
        assert message in str(caught.value)


def shape_with(name: str, quantization: dict[str, Any]) -> ModelShape:
    config = yaml.safe_load(find("models", name).read_text())["config"]
    return read_shape(config | {"quantization_config": quantization}, "config.json")
