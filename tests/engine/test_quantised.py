"""Quantised experts resident and streamed; damaged ones are named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moebatch.checkpoint.model_files import open_model
from moebatch.errors import CheckpointError, MoebatchError
from moebatch.layout.footprint import slot_bytes
from tests.engine.test_engine import policy, requests, run, tokens_of
from tests.model.oracle import greedy_answers, load
from tests.quantised import KINDS, decoded_beside, write_quantised

NEW_TOKENS = 5
SIZES = {"hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2}
NAN = torch.tensor(torch.nan)


@pytest.fixture
def folder(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def write(kind: str, *, fused: bool = False, **options: bool) -> Path:
        plain = tiny_checkpoint("mixtral", fused=fused, **SIZES)
        return write_quantised(plain, kind, tmp_path / kind, **options)

    return write


@pytest.mark.few(15)
@pytest.mark.parametrize("resident", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_decoded_weights(
    kind: str, resident: float, folder: Callable[..., Path]
) -> None:
    quantised = folder(kind, dense=resident == 0.0, shards=resident == 0.0)
    rows = requests((1, 33, 7, 12))
    model = load(decoded_beside(quantised))
    expected = greedy_answers(model, rows, NEW_TOKENS)
    assert tokens_of(run(quantised, policy(resident=resident), rows)) == expected


def changed(folder: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> str:
    """Changes, or removes, the first tensor whose name ends so."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.endswith(part))
    after = change(tensors.pop(name))
    save_file(tensors if after is None else tensors | {name: after.contiguous()}, path)
    return name


@pytest.mark.parametrize(
    ("kind", "part", "change", "message"),
    [
        ("fp8", "_scale_inv", lambda _: None, "is missing"),
        ("fp8", "_scale_inv", lambda t: t[:1], "has shape [1, 3], expected"),
        ("fp8", "_scale_inv", lambda t: t.int(), "is I32, expected F32"),
        ("int4", "w1.weight_packed", lambda t: t[:, :-1], "has shape [40, 5], expected [40, 6]"),
        ("int4", "w3.weight_scale", lambda t: t[:0], "has shape [0, 2], expected [40, 2]"),
        ("int4-zeros", "w2.weight_zero_point", lambda t: t[:-1], "expected [6, 3]"),
        ("mxfp4", "_blocks", lambda t: t[..., :-1], "expected [40, 2, 16]"),
        ("nvfp4", "w1.weight_scale_2", lambda _: None, "w1.weight_scale_2 is missing"),
        ("gptq", "w2.scales", lambda t: t[..., 1:], "expected [2, 48]"),
        ("bnb-nf4", "w1.weight", lambda t: t[1:], "has shape [959, 1], expected [960, 1]"),
        ("bnb-nf4", "w1.weight.absmax", lambda t: t.double(), "is F64, expected F32"),
        ("bnb-nf4", "w2.weight.quant_map", lambda _: None, "w2.weight.quant_map is missing"),
        ("bnb-nf4", "w2.weight.quant_state.bitsandbytes__nf4", lambda t: t[:0], "expected [256]"),
        ("bnb-nf4-nested", "w3.weight.nested_absmax", lambda _: None, "nested_absmax is missing"),
    ],
)
def test_what_is_wrong_in_headers_is_named(
    kind: str,
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    message: str,
    folder: Callable[..., Path],
) -> None:
    path = folder(kind)
    name = changed(path, part, change)
    with pytest.raises(CheckpointError) as caught:
        open_model(path, "float32")
    assert str(path) in str(caught.value)
    assert f"tensor {name} " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "part"), [("nvfp4", "weight_scale_2"), ("packed-nvfp4", "weight_global_scale")]
)
def test_the_scale_of_a_whole_matrix_is_one_number(
    kind: str, part: str, folder: Callable[..., Path]
) -> None:
    path = folder(kind, dense=True)
    changed(path, f"k_proj.{part}", lambda t: t.repeat(3))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight"):
        open_model(path, "float32")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scales_outside_experts_that_are_no_numbers_are_named(
    value: float, folder: Callable[..., Path]
) -> None:
    path = folder("int4", dense=True)
    name = changed(path, "k_proj.weight_scale", lambda t: t.fill_(value))
    weight = name.removesuffix("_scale")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the weight") as caught:
        run(path, policy(), requests((5, 12)), dtype="float32")
    assert weight in str(caught.value) and "NaN or infinity" in str(caught.value)


def test_scales_of_experts_that_are_no_numbers_fail_the_rows_that_met_them(
    folder: Callable[..., Path],
) -> None:
    path = folder("int4")
    changed(path, "layers.1.block_sparse_moe.experts.0.w1.weight_scale", lambda t: t.fill_(NAN))
    errors = [
        out.error for out in run(path, policy(), requests((5, 12)), dtype="float32") if out.error
    ]
    assert errors and all("layer 1, expert 0" in str(error) for error in errors)


def test_an_order_that_leads_outside_is_named(folder: Callable[..., Path]) -> None:
    path = folder("gptq-act-order")
    for expert in range(6):
        changed(path, f"layers.0.block_sparse_moe.experts.{expert}.w1.g_idx", lambda t: t + 9)
    with pytest.raises(MoebatchError, match=r"layer 0, expert \d: g_idx names groups"):
        run(path, policy(), requests((5, 12)), dtype="float32")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("{", "[", "the text of quant_state is no JSON"),
        ("bfloat16", "bfloat17", "quant_state has none of the dtypes bfloat16"),
        (": 64,", ": 63,", "blocksize of quant_state is 63, which is no size of blocks"),
        (": 64,", ": 32,", "18 scales do not make 1152 in blocks of 32"),
    ],
)
def test_texts_of_bitsandbytes_that_make_no_sense_are_named(
    before: str, after: str, message: str, folder: Callable[..., Path]
) -> None:
    def edited(text: torch.Tensor) -> torch.Tensor:
        new = bytes(text.tolist()).replace(before.encode(), after.encode())
        return torch.tensor(list(new), dtype=text.dtype)

    path = folder("bnb-nf4", dense=True)
    suffix = ".quant_state.bitsandbytes__nf4"
    name = changed(path, f"k_proj.weight{suffix}", edited)
    with pytest.raises(CheckpointError, match=message) as caught:
        run(path, policy(), requests((5, 12)), dtype="float32")
    assert name.removesuffix(suffix) in str(caught.value)


def test_gate_and_up_that_cannot_be_told_apart_are_named(folder: Callable[..., Path]) -> None:
    path = folder("gptq", fused=True)
    with pytest.raises(CheckpointError, match=r"layer 0, expert \d: gptq int4, .* be cut at row 0"):
        run(path, policy(), requests((5, 12)), dtype="float32")


@pytest.mark.parametrize("kind", ["fp8", "int4", "mxfp4"])
def test_codes_of_columns_that_are_rows_of_the_file_are_named(
    kind: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """As DBRX stores the last matrix of each expert."""
    quantised = write_quantised(tiny_checkpoint("dbrx"), kind, tmp_path / kind)
    with pytest.raises(CheckpointError, match="as rows of the file, which are read of plain num"):
        open_model(quantised, "auto")


def test_contradictions_of_the_config_are_said(folder: Callable[..., Path]) -> None:
    path = folder("int4")
    assert not open_model(path, "float32").warnings
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"quantization_config": KINDS["fp8"].config})
    )
    assert open_model(path, "float32").warnings == (
        f"{path}: config.json says that experts are stored as fp8, blocks of 16 x 16; by their "
        "tensors, which are believed, they are packed int4, groups of 32",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_no_larger_than_planned(kind: str, folder: Callable[..., Path]) -> None:
    files = open_model(folder(kind, shards=True), "float32")
    records = files.expert_records().values()
    assert max(record.num_bytes for record in records) <= slot_bytes(files.shape, files.dtypes)
    stored = {sum(place.num_bytes for place in record.places) for record in records}
    texts = "bnb" in kind  # of any length up to the planned one
    assert texts or stored == {files.dtypes.expert_bytes(files.shape)}
    assert max(stored) <= files.dtypes.expert_bytes(files.shape)
