"""Experts in two precisions: which ones stay wide, and that all of them are read."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import is_match
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moebatch.checkpoint.model_files import open_model
from moebatch.errors import CheckpointError, ConfigError
from moebatch.packing import pack
from moebatch.packing.order import PackOrder
from moebatch.packing.pack import Pack, PackSummary
from moebatch.packing.precision import choose_precisions
from moebatch.predict.learnt_files import TABLE, empty_table, save_table
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.spec.files.json_file import read_json
from moebatch.store.experts.packed import PackedLayout
from tests.few import examples
from tests.model.driver import Driver
from tests.model.oracle import greedy, load, prompts

PROMPTS = prompts(lengths=(1, 21, 60))
TinyCheckpoint = Callable[..., Path]


@pytest.fixture
def model(tiny_checkpoint: TinyCheckpoint) -> Path:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 2}
    return tiny_checkpoint("qwen3_moe", **sizes)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The lamp counts 3 of the rivers. " * 40)
    return path


def mixed(model: Path, output: Path, text: Path | None, bits: float = 5.0) -> PackSummary:
    order = PackOrder(model=model, to="int4", output=output, bits=bits, text=text)
    return Pack(order, print).execute()


def decoded(folder: Path, plain: Path) -> Path:
    """The model that compressed-tensors makes of it, group by group."""
    config = read_json(folder / "config.json")
    groups = [
        QuantizationScheme(**group)
        for group in config["quantization_config"]["config_groups"].values()
    ]
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        stem = name.removesuffix(".weight_packed")
        (scheme,) = [g for g in groups if is_match(stem, torch.nn.Linear(1, 1), g.targets)]
        parts = ("weight_packed", "weight_scale", "weight_shape")
        state = {part: tensors.pop(f"{stem}.{part}") for part in parts}
        tensors[f"{stem}.weight"] = compressor.decompress(state, scheme)["weight"].contiguous()
    plain.mkdir()
    for path in folder.glob("*.json"):
        if "safetensors" not in path.name:
            (plain / path.name).write_text(path.read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return plain


def test_answers_are_those_of_the_weights_that_compressed_tensors_decodes(
    model: Path, text: Path, tmp_path: Path
) -> None:
    summary = mixed(model, tmp_path / "out", text)
    assert summary.contents.num_experts == {"int4": 12, "int8": 4}
    oracle = load(decoded(tmp_path / "out", tmp_path / "plain"))
    ours = Driver(tmp_path / "out").generate(PROMPTS, 8, slice_tokens=16, stagger=1)
    assert [seq.answer for seq in ours] == [greedy(oracle, prompt, 8)[0] for prompt in PROMPTS]


def test_slots_hold_the_largest_and_plans_count_the_mean(
    model: Path, text: Path, tmp_path: Path
) -> None:
    summary = mixed(model, tmp_path / "out", text)
    files = open_model(tmp_path / "out", "auto")
    assert not files.warnings
    records, dtypes = files.expert_records(), files.dtypes
    read = sum(place.num_bytes for record in records.values() for place in record.places)
    assert read == summary.contents.expert_bytes[1]
    mean = dtypes.expert_bytes(files.shape) * len(records)
    assert mean == pytest.approx(read, rel=0.01)
    largest = max(sum(p.num_bytes for p in record.places) for record in records.values())
    assert dtypes.largest_expert_bytes(files.shape) == largest


def test_a_gpu_says_that_it_does_not_compute_them(model: Path, text: Path, tmp_path: Path) -> None:
    mixed(model, tmp_path / "out", text)
    records = open_model(tmp_path / "out", "auto").expert_records()
    with pytest.raises(
        CheckpointError, match="stored all alike, and such are computed in main memory"
    ):
        PackedLayout.of(records.values())


def test_a_pack_that_goes_on_keeps_its_choice(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*rest: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Pack, "_finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mixed(model, tmp_path / "out", text)
    monkeypatch.setattr(pack, "measure_gains", interrupted)
    first = mixed(model, tmp_path / "out", text)
    second = mixed(model, tmp_path / "out", text)
    assert second.was_there
    assert first.record.trade_off == second.record.trade_off
    assert first.contents.num_experts == second.contents.num_experts
    with pytest.raises(ConfigError, match="is no pack of these weights in this way"):
        mixed(model, tmp_path / "out", text, bits=6.0)


def test_popularity_may_come_from_a_calibration(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 2}
    model = tiny_checkpoint("qwen3_moe", seed=5, **sizes)
    with pytest.raises(ConfigError, match=r"--bits: needs to know .* give --text FILE, or calib"):
        mixed(model, tmp_path / "none", None)
    owner = open_model(model, "auto").owner
    table = empty_table(owner, 1)
    table.counts[0][1, 0, [2, 3]] = 1000
    TABLE.path(model).parent.mkdir()
    save_table(TABLE.path(model), table, owner)
    mixed(model, tmp_path / "out", None, bits=4.5)
    report = read_json(tmp_path / "out" / "moebatch" / "pack.json")
    assert report["in_int8"] == [[1, 2], [1, 3]]


gains_of_experts = st.lists(st.floats(0, 1), min_size=2, max_size=40)


@examples(8)
@given(gains_of_experts, st.floats(4.05, 7.95))
def test_the_budget_goes_to_the_experts_of_most_gain(gains: list[float], bits: float) -> None:
    by_expert = {ExpertKey(0, number): gain for number, gain in enumerate(gains)}
    wide, curve = choose_precisions(by_expert, bits)
    most = int((bits - 4) / 4 * len(gains) + 1e-6)
    assert len(wide) <= most
    chosen = sum(by_expert[key] for key in wide)
    assert chosen == pytest.approx(sum(sorted(gains)[::-1][:most]), abs=1e-4)
    remaining = [point.remaining for point in curve]
    assert np.all(np.diff(remaining) <= 1e-4)
    assert (remaining[0], remaining[-1]) == (1.0, 0.0)
