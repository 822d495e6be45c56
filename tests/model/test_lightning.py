"""Lightning attention as it is released, over long prompts, and how fast its matrices fade."""

import json
from pathlib import Path

import pytest
import torch
from transformers.models.minimax import modeling_minimax
from transformers.models.minimax_m2 import modeling_minimax_m2

from moebatch.model.native import loader
from moebatch.spec.model.models import load_model
from moebatch.spec.model.recurrence import LightningAttention
from tests.model import oracle
from tests.model.driver import Driver
from tests.model.test_gated_delta import assert_long_prompts_are_answered_as_by_transformers
from tests.model.test_oracle import assert_as_transformers
from tests.native import kernels
from tests.tiny import edit_config, write_checkpoint

WAYS = ["1", "0"] if kernels() else ["0"]
PARTS = {
    "full_attn": "layernorm_full_attention",
    "linear_attn": "layernorm_linear_attention",
    "mlp": "layernorm_mlp",
}


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("MiniMaxText01ForCausalLM", "minimax_text_01"),
        ("MiniMaxM1ForCausalLM", "minimax_m1"),
    ],
)
def test_as_it_is_released(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architecture: str, model_type: str
) -> None:
    """Other keys, and heads of which a part rotates: transformers rotates all of them here, so that
    it borrows from MiniMax-M2."""
    folder = write_checkpoint(tmp_path, "minimax")
    model = oracle.load(folder)
    model.config.rope_parameters = {
        "rope_type": "default",
        "rope_theta": 7000.0,
        "partial_rotary_factor": 0.6,
    }
    model.model.rotary_emb = modeling_minimax_m2.MiniMaxM2RotaryEmbedding(model.config)
    monkeypatch.setattr(
        modeling_minimax, "apply_rotary_pos_emb", modeling_minimax_m2.apply_rotary_pos_emb
    )
    config = json.loads((folder / "config.json").read_text())
    factors = {
        f"{released}_{factor}": config[f"{part}_{factor}_factor"]
        for part, released in PARTS.items()
        for factor in ("alpha", "beta")
    }
    gone = [key for key in config if key.endswith("_factor")]
    edit_config(
        folder,
        **dict.fromkeys([*gone, "layer_types", "rope_parameters"]),
        **factors,
        architectures=[architecture],
        model_type=model_type,
        attn_type_list=[0, 1, 0],
        postnorm=True,
        rope_theta=7000.0,
        rotary_dim=6,
        shared_intermediate_size=0,
        shared_moe_mode="sigmoid",
    )
    assert_as_transformers(Driver(folder), model=model, slice_tokens=7)


def test_files_that_say_nothing_of_positions(tmp_path: Path) -> None:
    """The base of transformers, which is not that of MiniMax-M2."""
    folder = write_checkpoint(tmp_path, "minimax")
    edit_config(folder, rope_parameters=None)
    model = oracle.load(folder)
    assert model.config.rope_parameters["rope_theta"] == 1e6
    assert_as_transformers(Driver(folder), model=model)


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("slice_tokens", [1000, 130])
def test_heads_of_all_layers_fade_as_fast_as_those_of_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, native: str, slice_tokens: int
) -> None:
    """Over hundreds of tokens, of which those of the last heads are hardly forgotten."""
    monkeypatch.setenv(loader.SWITCH, native)
    folder = write_checkpoint(
        tmp_path,
        "minimax",
        max_position_embeddings=1024,
        num_attention_heads=6,
        num_hidden_layers=5,
        layer_types=[*3 * ["linear_attention"], "full_attention", "linear_attention"],
    )
    assert_long_prompts_are_answered_as_by_transformers(folder, slice_tokens)


def test_fading_of_the_released_model() -> None:
    """Slopes of transformers for its sizes, layer by layer."""
    shape = load_model("minimax-text-01").shape
    recurrence, attention = shape.recurrence, modeling_minimax.MiniMaxLightningAttention
    assert isinstance(recurrence, LightningAttention)
    for layer in (0, 1, 40, 78):
        module = torch.nn.Module()
        module.num_attention_heads, module.num_hidden_layers = 64, 80  # type: ignore[assignment]
        module.layer_idx = layer  # type: ignore[assignment]
        slopes = attention.get_slope_rate(module).flatten()
        torch.testing.assert_close(-torch.tensor(recurrence.fading(layer)), slopes)
