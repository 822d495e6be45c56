"""DeepSeek-MoE, which transformers 5 has no class for: held against Qwen2-MoE, of which it is a
case but for a gate of the shared expert. A gate that is zero halves what that makes."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests import tiny
from tests.engine.test_engine import policy, requests, run, tokens_of
from tests.gguf_models import write_gguf
from tests.model import oracle
from tests.model.driver import Driver
from tests.model.test_oracle import assert_as_transformers

_CONFIG = {
    "architectures": ["DeepseekForCausalLM"],
    "model_type": "deepseek",
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "attention_bias": False,
}


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    like = tiny.write_checkpoint(
        tmp_path / "like",
        "qwen2_moe",
        num_key_value_heads=4,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[0],
        qkv_bias=False,
    )
    tensors = load_file(like / "model.safetensors")
    for name, tensor in tensors.items():
        if "shared_expert_gate" in name:
            tensor.zero_()
    save_file(tensors, like / "model.safetensors", metadata={"format": "pt"})

    folder = Path(shutil.copytree(like, tmp_path / "deepseek"))
    renamed = {
        name.replace("shared_expert.", "shared_experts."): tensor
        * (0.5 if "shared_expert.down_proj" in name else 1.0)
        for name, tensor in tensors.items()
        if "shared_expert_gate" not in name
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((like / "config.json").read_text())
    for key in ("num_experts", "mlp_only_layers", "shared_expert_intermediate_size", "qkv_bias"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config | _CONFIG))

    model = oracle.load(like)
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7, stagger=2)

    rows = requests((1, 33, 7))
    expected = [tuple(oracle.greedy(model, row.prompt_tokens, 5)[0]) for row in rows]
    in_gguf = write_gguf(folder, tmp_path / "gguf", lambda name: "F32")
    assert tokens_of(run(in_gguf, policy(), rows, dtype="float32")) == expected
