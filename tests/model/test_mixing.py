"""Hidden states that are mixed with what layers make, and norms of that, against transformers' own
modules of Muse Spark."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moebatch.checkpoint.model_files import open_model
from moebatch.model.dense_weights import DenseWeights
from moebatch.model.residuals import mix
from moebatch.model.scratch import Scratch
from moebatch.spec.model.blocks import Mixing
from tests.engine.test_engine import NEW_TOKENS, policy, requests, run, tokens_of
from tests.model.oracle import greedy_answers, load
from tests.tiny import write_checkpoint


@pytest.mark.parametrize("temperature", [0.3, 0.02])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_mix_as_residual_gates_do(temperature: float, dtype: torch.dtype) -> None:
    """The lower temperature brings some shares so near to one that least squares hold."""
    from transformers.models.muse_spark import modeling_muse_spark as muse

    config = muse.MuseSparkTextConfig(
        hidden_size=32, num_attention_heads=4, residual_gate_temperature=temperature
    )
    gate = muse.MuseSparkResidualGate(config)
    gate.gate.data = torch.linspace(-0.3, 0.3, 32)
    x_MD, made_MD = torch.randn(2, 7, 32, generator=torch.manual_seed(1)).to(dtype)
    expected_MD = gate(x_MD, made_MD)
    share_D = (gate.gate.detach() / temperature).sigmoid()
    frame = Scratch(7 * 32 * 2, device=x_MD.device, dtype=dtype).frame()
    mix(frame, x_MD, made_MD, share_D, Mixing(temperature=temperature))
    torch.testing.assert_close(x_MD, expected_MD)


def test_shares_and_scales_are_worked_out_when_weights_are_read(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    folder = tiny_checkpoint("muse_spark")
    stored = load_file(folder / "model.safetensors")
    layer = "model.language_model.layers.1."
    weights = DenseWeights.load(open_model(folder, "float32"))
    found, final = weights.layers[1], weights.globals["final_norm"]
    gate = stored[layer + "post_attention_residual_gate.gate"]
    assert torch.equal(found["mixer_share"], (gate / 0.3).sigmoid())
    assert torch.equal(found["router"], stored[layer + "mlp.gate.weight"] * 0.7)
    norm = stored[layer + "mlp.experts.post_expert_norm.weight"]
    assert torch.equal(found["each_expert_norm"], norm + 1)
    assert torch.equal(final, stored["model.language_model.norm.weight"])


def test_experts_may_lie_apart(tmp_path: Path) -> None:
    """As `moebatch pack` writes them, which transformers does not read."""
    folder = write_checkpoint(tmp_path / "model", "muse_spark")
    rows = requests((1, 17, 40, 96))
    expected = greedy_answers(load(folder), rows, NEW_TOKENS)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        roles = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for expert, matrix in enumerate(tensors.pop(name)):
            for role, part in zip(roles, matrix.chunk(len(roles)), strict=True):
                apart = f"{name.rpartition('.')[0]}.{expert}.{role}.weight"
                tensors[apart] = part.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    for resident in (0.0, 1.0):
        assert tokens_of(run(folder, policy(num_slots=9, resident=resident), rows)) == expected
