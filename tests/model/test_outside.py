"""A family and a weight format from outside the package: one of each is made up here, and run.

Shape letters: N rows after bucketing, T tokens, D hidden, F expert width, E experts, K experts per
token.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from moebatch.checkpoint.model_files import open_model
from moebatch.errors import CheckpointError
from moebatch.formats.plain import FLOAT32
from moebatch.formats.registry import FORMATS
from moebatch.formats.weight_format import Matrix, StoredPart, WeightFormat
from moebatch.model.attention.grouped import GroupedAttentionBlock
from moebatch.model.families import registry
from moebatch.model.families.family import Family
from moebatch.model.families.registry import FAMILIES
from moebatch.model.native import loader
from moebatch.model.operators import Operators
from moebatch.model.products import Weights
from moebatch.model.scratch import Frame
from moebatch.registry import Registry
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.parts import grouped_attention
from moebatch.spec.families.registry import FAMILIES as DESCRIBED_FAMILIES
from moebatch.spec.model.blocks import Mlp, Norm, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers, ModelShape
from moebatch.spec.model.shape_reader import read_shape
from moebatch.spec.model.tensor_names import ExpertLayout, TensorNames
from moebatch.store.dense import load_embedded, load_gates
from tests.model.driver import Driver
from tests.shapes import load_shape

D, F_, E, K, V, LAYERS, HEADS = 32, 24, 5, 2, 60, 2, 4
PROMPTS = [[5, 9, 2, 40, 7, 11, 3], [8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]


class RowScaled(WeightFormat):
    """Whole numbers of a byte, and a scale for each row."""

    name = quant_method = "row-scaled"

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        return StoredPart(name, "I8", shape), StoredPart(f"{name}_scale", "F32", shape[:-1])

    def decode(self, parts: Sequence[Tensor], out: Tensor) -> None:
        whole, scale = parts
        out.copy_(whole).mul_(scale[:, None])


def squared_relu(
    frame: Frame, x_ND: Tensor, num_rows: int, matrices: Mapping[str, Matrix], operators: Operators
) -> Tensor:
    """``down(relu(up(x))^2)``, without a gate."""
    up_NF = frame.take(len(x_ND), matrices["up"].shape[0])
    operators.products.linear(x_ND, matrices["up"], None, up_NF)
    up_NF[:num_rows].relu_().square_()
    y_ND = frame.take(*x_ND.shape)
    return operators.products.linear(up_NF, matrices["down"], None, y_ND)[:num_rows]


def sigmoid_router(
    logits_TE: Tensor, shape: ModelShape, weights: Weights, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Experts weigh by themselves, whatever the others do."""
    weights_TK, experts_TK = logits_TE.float().sigmoid().topk(shape.experts_per_token)
    return weights_TK.to(dtype), experts_TK


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    return Layers(
        attention=grouped_attention(keys),
        router=Router(),
        moe_layers=tuple(range(num_layers)),
        expert=Mlp(width=keys.count("thickness"), roles=("up", "down")),
        sliding_windows=(None,) * num_layers,
        norm=Norm(counts_from_one=True),
    )


LAYER = "stack.{layer}."
DESCRIBED = FamilySpec(
    architecture="LlamadilloForCausalLM",
    model_type="llamadillo",
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "num_key_value_heads": 2,
        "thickness": F_,
    },
    spelling={"thickness": "burrow.thickness"},
    layers=_layers,
    names=TensorNames(
        roles={
            "embedding": ("words",),
            "head": ("unwords",),
            "final_norm": ("last.norm",),
            "input_norm": (LAYER + "norm.a",),
            "mlp_norm": (LAYER + "norm.b",),
            "router": (LAYER + "choose",),
            **{role: (LAYER + f"att.{role}",) for role in "qkvo"},
        },
        experts=(
            ExpertLayout(
                weights={
                    LAYER + "burrow.{expert}.in": ("up",),
                    LAYER + "burrow.{expert}.out": ("down",),
                }
            ),
            ExpertLayout(
                weights={LAYER + "burrows.in": ("up",), LAYER + "burrows.out": ("down",)},
                is_stacked=True,
            ),
            ExpertLayout(
                weights={LAYER + "warren.in": ("up",), LAYER + "warren.out": ("down",)},
                is_stacked=True,
                is_flat=True,
            ),
        ),
    ),
    rotary_type="mixtral",
)
COMPUTED = Family(attention=GroupedAttentionBlock, router=sigmoid_router, expert=squared_relu)
CONFIG = {
    "architectures": ["LlamadilloForCausalLM"],
    "model_type": "llamadillo",
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_experts": E,
    "num_experts_per_tok": K,
    "burrow": {"thickness": F_},
    "rope_theta": 500.0,
    "dtype": "float32",
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    name = DESCRIBED.architecture
    with (
        patch.dict(DESCRIBED_FAMILIES, {name: DESCRIBED}),
        patch.dict(FAMILIES, {name: COMPUTED}),
        patch.dict(FORMATS, {"row-scaled": RowScaled()}),
    ):
        yield


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Random weights of the family, experts apart and in float32."""
    generator = torch.Generator().manual_seed(3)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 1.2 / size[-1] ** 0.5

    found = {"words": noise(V, D), "unwords": noise(V, D) * 4, "last.norm": noise(D)}
    for prefix in (f"stack.{layer}." for layer in range(LAYERS)):
        found |= {prefix + "norm.a": noise(D), prefix + "norm.b": noise(D)}
        found |= {prefix + "choose": noise(E, D) * 3}
        sizes = {"q": (D, D), "k": (D // 2, D), "v": (D // 2, D), "o": (D, D)}
        found |= {f"{prefix}att.{role}": noise(*size) for role, size in sizes.items()}
        for expert in range(E):
            found[f"{prefix}burrow.{expert}.in"] = noise(F_, D)
            found[f"{prefix}burrow.{expert}.out"] = noise(D, F_)
    return found


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same."""
    return dict(tensors)


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with the experts of a layer in one tensor."""
    found = {name: tensor for name, tensor in tensors.items() if ".burrow." not in name}
    for layer in range(LAYERS):
        for way in ("in", "out"):
            experts = [tensors[f"stack.{layer}.burrow.{expert}.{way}"] for expert in range(E)]
            found[f"stack.{layer}.burrows.{way}"] = torch.stack(experts)
    return found


def flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same one below the other."""
    return {
        name.replace("burrows", "warren"): tensor.flatten(0, 1) if ".burrows." in name else tensor
        for name, tensor in stacked(tensors).items()
    }


def row_scaled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same with all matrices in bytes, those outside experts included."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            found[name] = tensor
            continue
        found[f"{name}_scale"] = scale = tensor.abs().amax(-1) / 127
        found[name] = (tensor / scale[..., None]).round().to(torch.int8)
    return found


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a reader of bytes and scales sees."""
    return {
        name: tensor.float() * tensors[f"{name}_scale"][..., None]
        if f"{name}_scale" in tensors
        else tensor
        for name, tensor in tensors.items()
    }


def written(folder: Path, tensors: Mapping[str, Tensor], **entries: Any) -> Path:
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | entries))
    return folder


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("lying", [apart, stacked, flat])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_a_family_and_a_format_from_outside_run_as_their_formulas_say(
    tensors: dict[str, Tensor],
    tmp_path: Path,
    lying: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    is_quantised: bool,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(loader.SWITCH, kernels)
    expected = whole(row_scaled(tensors)) if is_quantised else tensors
    stored = row_scaled(lying(tensors)) if is_quantised else lying(tensors)
    driver = Driver(written(tmp_path, stored))
    assert driver.files.experts.format.name == ("row-scaled" if is_quantised else "float32")
    seqs = driver.generate(PROMPTS, 6, slice_tokens=4, stagger=1)
    for prompt, seq in zip(PROMPTS, seqs, strict=True):
        logits_TV = reference(expected, prompt + seq.answer[:-1])[len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack(seq.logits), logits_TV, rtol=1e-4, atol=1e-4)
        assert seq.answer == logits_TV.argmax(-1).tolist()


def test_the_planner_counts_what_the_files_hold(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "row-scaled"}}
    files = open_model(written(tmp_path, row_scaled(tensors), **quantised), "auto")
    assert files.shape.expert_format is files.experts.format
    assert files.shape.num_params == sum(tensor.numel() for tensor in tensors.values())
    assert files.dtypes.compute == "float32" and files.dtypes.converts
    (expert_bytes,) = {
        sum(place.num_bytes for place in record.places)
        for record in files.expert_records().values()
    }
    assert files.dtypes.expert_bytes(files.shape) == expert_bytes == F_ * (D + 4) + D * (F_ + 4)
    assert files.shape.expert_bytes(FLOAT32) == 4 * 2 * D * F_


def test_gates_and_rows_of_the_embedding_are_read_by_themselves(
    tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    files = open_model(written(tmp_path, row_scaled(tensors)), "auto")
    expected = whole(row_scaled(tensors))
    assert load_embedded(files, [7, 3]).equal(expected["words"][[7, 3]].half())
    for layer, gate in enumerate(load_gates(files, torch.float32)):
        torch.testing.assert_close(gate["router"], expected[f"stack.{layer}.choose"])


def test_what_the_format_misses_is_named(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    stored = row_scaled(tensors)
    del stored["stack.1.burrow.3.in_scale"]
    with pytest.raises(CheckpointError, match=r"tensor stack\.1\.burrow\.3\.in_scale is missing"):
        open_model(written(tmp_path, stored), "auto")


def test_experts_of_two_formats_are_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    stored = tensors | row_scaled({name: tensors[name] for name in ["stack.0.burrow.1.in"]})
    with pytest.raises(CheckpointError, match=r"several formats \(float32; row-scaled\)"):
        open_model(written(tmp_path, stored), "auto")


def test_a_family_without_names_is_planned_only(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path, tensors)
    nameless = replace(DESCRIBED, names=TensorNames(roles={}, experts=()))
    monkeypatch.setitem(DESCRIBED_FAMILIES, DESCRIBED.architecture, nameless)
    assert load_shape(folder).num_params == sum(tensor.numel() for tensor in tensors.values())
    with pytest.raises(CheckpointError, match="LlamadilloForCausalLM can be planned only"):
        open_model(folder, "auto")


def test_faults_name_keys_as_the_family_spells_them() -> None:
    with pytest.raises(CheckpointError, match=r"burrow.thickness: expected a whole number"):
        read_shape(CONFIG | {"burrow": {"thickness": "wide"}}, "config.json")


def test_registering_makes_a_family_known_to_planner_and_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described: Registry[FamilySpec] = Registry({})
    computed: Registry[Family] = Registry({})
    monkeypatch.setattr(registry, "DESCRIBED", described)
    monkeypatch.setattr(registry, "FAMILIES", computed)
    registry.register(DESCRIBED, COMPUTED)
    assert described["LlamadilloForCausalLM"] is DESCRIBED
    assert computed["LlamadilloForCausalLM"] is COMPUTED
    with pytest.raises(ValueError, match="LlamadilloForCausalLM is registered already"):
        registry.register(DESCRIBED, COMPUTED)


def reference(tensors: Mapping[str, Tensor], tokens: Sequence[int]) -> Tensor:
    """Logits [T, V] of a sequence, written down without the package."""
    x_TD = tensors["words"][torch.tensor(tokens)]
    for layer in range(LAYERS):
        own = {
            name.removeprefix(f"stack.{layer}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"stack.{layer}.")
        }
        x_TD = x_TD + attended(own, normed(x_TD, own["norm.a"]))
        x_TD = x_TD + burrowed(own, normed(x_TD, own["norm.b"]))
    return normed(x_TD, tensors["last.norm"]) @ tensors["unwords"].T


def normed(x_TD: Tensor, weight_D: Tensor) -> Tensor:
    return x_TD * (x_TD.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (1 + weight_D)


def attended(own: Mapping[str, Tensor], x_TD: Tensor) -> Tensor:
    head = D // HEADS
    q, k, v = (
        (x_TD @ own[f"att.{role}"].T).unflatten(-1, (-1, head)).transpose(0, 1) for role in "qkv"
    )
    angles = torch.arange(len(x_TD))[:, None] / 500.0 ** (torch.arange(0, head, 2) / head)
    out = F.scaled_dot_product_attention(
        rotated(q, angles),
        rotated(k, angles).repeat_interleave(2, 0),
        v.repeat_interleave(2, 0),
        is_causal=True,
    )
    return out.transpose(0, 1).flatten(1) @ own["att.o"].T


def rotated(x_HTC: Tensor, angles_TR: Tensor) -> Tensor:
    first, second = x_HTC.chunk(2, -1)
    cos, sin = angles_TR.cos(), angles_TR.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def burrowed(own: Mapping[str, Tensor], x_TD: Tensor) -> Tensor:
    weights_TK, experts_TK = (x_TD @ own["choose"].T).sigmoid().topk(K)
    out_TD = torch.zeros_like(x_TD)
    for token, (weights_K, experts_K) in enumerate(zip(weights_TK, experts_TK, strict=True)):
        for weight, expert in zip(weights_K, experts_K.tolist(), strict=True):
            up_F = F.relu(own[f"burrow.{expert}.in"] @ x_TD[token]).square()
            out_TD[token] += weight * (own[f"burrow.{expert}.out"] @ up_F)
    return out_TD
