"""Damaged weights are found by a few of their rows, and sound ones raise no suspicion."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moebatch.checkpoint.index import Weight
from moebatch.checkpoint.inventory import Inventory
from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.errors import CheckpointError
from moebatch.store.dense import TensorReader
from moebatch.store.examination import Examined, examine
from tests.gguf_models import write_gguf
from tests.quantised import KINDS, write_quantised

SIZES: Mapping[str, Any] = {
    "hidden_size": 80,
    "moe_intermediate_size": 72,
    "shared_expert_intermediate_size": 88,
    "num_hidden_layers": 4,
}
Change = Callable[[Tensor], Tensor]
SOME = (
    "fp8",
    "fp8-tensor",
    "int4-zeros",
    "gptq-act-order",
    "awq",
    "bnb-nf4-nested",
    "packed-nvfp4",
)
"""Kinds that are stored in different ways."""
WHOLE = ("bnb-nf4", "bnb-fp4", "bnb-nf4-nested")
"""Neither rows nor columns can be read apart."""
OF_LAYER = "layers.1.mlp.experts."


@pytest.fixture
def folder(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def write(kind: str, *, fused: bool = False, **options: bool) -> Path:
        plain = tiny_checkpoint("qwen2_moe", fused=fused, **SIZES)
        return write_quantised(plain, kind, tmp_path / kind, **options)

    return write


def change(folder: Path, part: str, end: str, how: Change) -> list[str]:
    """Changes all tensors with this part in their names and this end; returns the names."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = sorted(name for name in tensors if part in name and name.endswith(end))
    save_file(tensors | {name: how(tensors[name]).contiguous() for name in names}, path)
    return names


def examined(folder: Path) -> Examined:
    return examine(open_model(folder, "auto"))


def all_weights(files: ModelFiles) -> Iterator[Weight]:
    yield from files.expert_weights(1, 2)
    yield from (each for each in files.layer_weights(1).values() if len(each.shape) == 2)


@pytest.mark.few(kind=SOME)
@pytest.mark.parametrize("kind", KINDS)
def test_sound_weights_raise_no_suspicion(kind: str, folder: Callable[..., Path]) -> None:
    assert examined(folder(kind, dense=True)) == Examined()


@pytest.mark.parametrize("type_name", ["F16", "Q4_0", "Q8_0", "Q4_K", "IQ4_XS"])
def test_sound_weights_of_gguf_raise_none_either(
    type_name: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    plain = tiny_checkpoint(hidden_size=256, num_hidden_layers=2, intermediate_size=512)
    path = write_gguf(plain, tmp_path / "model", lambda name: type_name)
    assert examined(path) == Examined()


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "int4-zeros"])
def test_stacked_experts_are_examined_one_by_one(kind: str, folder: Callable[..., Path]) -> None:
    path = folder(kind, fused=True)
    assert examined(path) == Examined()
    end = {"fp8": "_scale_inv", "mxfp4": "_scales", "int4-zeros": "_scale"}[kind]
    names = change(path, OF_LAYER, end, lambda t: (t.float() * 0 + 200).to(t.dtype))
    (found,) = examined(path).suspicions
    assert "experts.gate_up_proj" in names[1] and len(names) == 2
    assert "experts.gate_up_proj[1]' and 7 more of those read, layer 1," in str(found)
    assert "another size" in str(found)


@pytest.mark.few(kind=SOME)
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_lines_of_the_weight(kind: str, folder: Callable[..., Path]) -> None:
    reader = TensorReader()
    for weight in all_weights(open_model(folder(kind, dense=True), "auto")):
        whole = decoded(reader, weight)
        samples = [decoded(reader, part) for part in weight.sampled(16)]
        assert torch.equal(samples[0], whole[: len(samples[0]), : samples[0].shape[1]])
        assert all(is_part(sample, whole) for sample in samples)
        assert kind in WHOLE or sum(map(Tensor.numel, samples)) <= 32 * max(whole.shape)


def decoded(reader: TensorReader, weight: Weight) -> Tensor:
    out = torch.empty(weight.shape)
    weight.format.decode(reader.parts(weight), out)
    return out


def is_part(sample: Tensor, whole: Tensor) -> bool:
    """Neighbouring rows or columns."""
    axis = 0 if sample.shape[1] == whole.shape[1] else 1
    count = sample.shape[axis]
    starts = range(whole.shape[axis] - count + 1)
    return any(torch.equal(whole.narrow(axis, start, count), sample) for start in starts)


@pytest.mark.few(kind=SOME)
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_counted_once(kind: str, folder: Callable[..., Path]) -> None:
    files = open_model(folder(kind, dense=True), "auto")
    found = Inventory.of(files)
    total = sum(each.num_bytes for each in files.checkpoint.tensors.values())
    assert sum(kind.num_bytes for kind in found.kinds) + found.unread_bytes == total
    assert sum(kind.num_numbers for kind in found.kinds) == files.shape.num_params
    experts, *others = found.kinds
    assert (experts.kind, dict(experts.formats)) == ("experts", {KINDS[kind].format: 72})
    assert found.is_as_claimed and found.claimed == KINDS[kind].format
    assert [other.kind for other in others] == [
        *("shared experts", "attention", "router", "norms", "embeddings", "head")
    ]


@pytest.mark.parametrize(
    ("kind", "end", "how", "message"),
    [
        ("fp8", "_scale_inv", torch.reciprocal, "another size"),
        ("fp8-channel", "_scale", torch.reciprocal, "another size"),
        ("fp8-ue8m0", "_scale_inv", lambda t: invert_powers(t), "another size"),
        ("int4", "_scale", torch.reciprocal, "another size"),
        ("gptq", ".scales", torch.reciprocal, "another size"),
        ("mxfp4", "_scales", lambda t: 254 - t, "another size"),
        ("nvfp4", "_scale_2", torch.reciprocal, "another size"),
        ("packed-nvfp4", "_global_scale", torch.reciprocal, "another size"),
        ("bnb-nf4", ".absmax", lambda t: 1000 * t, "another size"),
        ("int4-zeros", "_zero_point", lambda t: t + 0x11111111, "not about zero"),
        ("gptq-v2", ".qzeros", lambda t: t - 0x11111111, "not about zero"),
        ("gptq-act-order", ".qzeros", lambda t: t + 0x11111111, "not about zero"),
        ("awq", ".qzeros", lambda t: t - 0x11111111, "not about zero"),
        ("int4", "_scale", torch.zeros_like, "scales that are zero"),
    ],
)
def test_damage_of_a_layer_is_named(
    kind: str, end: str, how: Change, message: str, folder: Callable[..., Path]
) -> None:
    path = folder(kind)
    assert change(path, OF_LAYER, end, how)
    found = examined(path)
    (suspicion,) = found.suspicions
    assert not found.faults and suspicion.file == str(path / "model.safetensors")
    assert OF_LAYER in suspicion.message and "11 more of those read, layer 1," in suspicion.message
    assert message in suspicion.message


def invert_powers(scales: Tensor) -> Tensor:
    return (254 - scales.view(torch.uint8)).view(scales.dtype)


def test_zero_points_of_the_other_version_are_suspected_in_all_layers(
    folder: Callable[..., Path],
) -> None:
    path = folder("gptq-v2")
    config = path / "config.json"
    config.write_text(config.read_text().replace("gptq_v2", "gptq"))
    (suspicion,) = examined(path).suspicions
    assert "layers 0 to 3, has weights that are not about zero" in suspicion.message


def test_scales_of_all_experts_upside_down_are_suspected(folder: Callable[..., Path]) -> None:
    path = folder("fp8")
    change(path, ".mlp.experts.", "_scale_inv", torch.reciprocal)
    (suspicion,) = examined(path).suspicions
    assert "of a size that models do not have" in suspicion.message


@pytest.mark.parametrize(
    ("kind", "end", "value"),
    [
        ("fp8", ".weight_scale_inv", torch.nan),
        ("fp8", ".weight_scale_inv", torch.inf),
        ("fp8-ue8m0", ".weight_scale_inv", 255),
        ("mxfp8", ".weight_scale", 255),
        ("int4", ".weight_scale", torch.inf),
        ("awq", ".scales", torch.nan),
        ("nvfp4", ".weight_scale", torch.nan),
        ("packed-nvfp4", ".weight_global_scale", torch.nan),
        ("bnb-nf4", ".weight.absmax", torch.nan),
    ],
)
def test_a_scale_that_is_no_number_is_a_fault(
    kind: str, end: str, value: float, folder: Callable[..., Path]
) -> None:
    def first_broken(scales: Tensor) -> Tensor:
        flat = scales.view(torch.uint8) if value == 255 else scales
        flat.view(-1)[0] = value
        return scales

    path = folder(kind)
    (name,) = change(path, "layers.1.mlp", f"experts.1.up_proj{end}", first_broken)
    found = examined(path)
    (fault,) = found.faults
    assert not found.suspicions and fault.file == str(path / "model.safetensors")
    assert fault.message == f"'{name}' holds no numbers: NaN or infinity"


def test_numbers_outside_experts_are_looked_at(folder: Callable[..., Path]) -> None:
    path = folder("int4")
    (name,) = change(path, "layers.2.", "o_proj.weight", lambda t: t * torch.nan)
    (fault,) = examined(path).faults
    assert name in fault.message


def test_an_expert_that_was_left_as_it_was_is_named(folder: Callable[..., Path]) -> None:
    path = folder("int4") / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    for suffix in ("_packed", "_scale", "_shape"):
        del tensors[name + suffix]
    save_file(tensors | {name: torch.zeros(80, 72, dtype=torch.bfloat16)}, path)
    with pytest.raises(CheckpointError, match="several formats") as caught:
        open_model(path.parent, "auto")
    assert f"1 in layer 2 are not: '{name}' in model.safetensors is bfloat16" in str(caught.value)
