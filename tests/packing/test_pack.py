"""Packs of tiny models: what is written, what is not written over, and what kills do to it."""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moebatch.checkpoint.direct import PAGE_BYTES
from moebatch.checkpoint.index import Checkpoint
from moebatch.checkpoint.model_files import ModelFiles, open_model
from moebatch.errors import CheckpointError, ConfigError, DoesNotFit
from moebatch.formats.weight_format import StoredMatrix
from moebatch.journal.files import Files
from moebatch.packing import pack
from moebatch.packing.order import PackOrder
from moebatch.packing.pack import Pack, PackSummary
from moebatch.plan.question import stored_as
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.spec.model.precision import GROUPS, Precision
from moebatch.store.experts.page_sources import FilePages
from moebatch.store.memory import Arena
from tests.command import moebatch
from tests.model.driver import Driver
from tests.model.oracle import greedy, load, prompts
from tests.quantised import write_quantised

_WIDTHS = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 96},
    "phimoe": {"hidden_size": 64, "intermediate_size": 96},
    "hy_v3": {"hidden_size": 64, "moe_intermediate_size": 96},
    "nemotron_h": {"hidden_size": 40, "moe_latent_size": 64, "moe_intermediate_size": 96},
    "sarvam_moe": {"hidden_size": 64, "moe_intermediate_size": 96},
    "jamba": {"hidden_size": 64, "intermediate_size": 96},
    "axk2": {"hidden_size": 64, "moe_intermediate_size": 96},
    "muse_spark": {
        "moe_hidden_size": 64,
        "moe_intermediate_size": 96,
        "mlp_layer_types": None,
    },
    "mistral_large4": {
        "hidden_size": 64,
        "moe_intermediate_size": 96,
        "no_rope_layers": [1, 0],
    },
    "dots3_note_text": {
        "hidden_size": 64,
        "moe_intermediate_size": 96,
        "first_k_dense_replace": 0,
        "layer_types": ["indexed_attention", "sliding_attention"],
    },
    "beam": {
        "hidden_size": 64,
        "moe_intermediate_size": 96,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
    },
    "lfm2_moe": {
        "hidden_size": 64,
        "moe_intermediate_size": 96,
        "layer_types": ["conv", "full_attention"],
    },
    "minimax": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "kimi_linear": {
        "hidden_size": 64,
        "moe_intermediate_size": 96,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "bailing_hybrid": {
        "hidden_size": 64,
        "moe_intermediate_size": 96,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "kolibri1": {
        "hidden_size": 64,
        "moe_intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "flint": {
        "hidden_size": 64,
        "moe_intermediate_size": 96,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "dbrx": {
        "hidden_size": 64,
        "d_model": 64,
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 3, "moe_top_k": 2},
    },
}
PROMPTS = prompts(lengths=(1, 21, 60))
_STEPS: Sequence[tuple[Any, str]] = (
    *((Files, name) for name in ("create", "write", "sync", "replace", "sync_folder")),
    *((pack, "write_text"), (shutil, "copyfile")),
)
TinyCheckpoint = Callable[..., Path]


def model_of(tiny_checkpoint: TinyCheckpoint, family: str = "qwen3_moe", **options: object) -> Path:
    return tiny_checkpoint(family, **{"num_hidden_layers": 2, **_WIDTHS[family], **options})


def packed(model: Path, output: Path, to: Precision = "int4", **options: Any) -> PackSummary:
    return Pack(PackOrder(model=model, to=to, output=output, **options), print).execute()


def bytes_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("to", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "50KB"}, {"fused": True}])
def test_everything_but_experts_is_copied(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, to: Precision, options: dict[str, object]
) -> None:
    model, output = model_of(tiny_checkpoint, **options), tmp_path / "out"
    summary = packed(model, output, to)
    before, after = Checkpoint.open(model), Checkpoint.open(output)
    assert (
        sum(each.num_bytes for each in after.tensors.values()) == summary.contents.weight_bytes[1]
    )
    for name in before.tensors:
        if ".experts." not in name:
            extents = before.extent(name), after.extent(name)
            first, second = (e.path.read_bytes()[e.offset :][: e.num_bytes] for e in extents)
            assert first == second, name
    kept = {path.name for path in model.iterdir() if ".safetensors" not in path.name}
    assert kept <= {path.name for path in output.iterdir()}
    assert (output / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert not [path for path in tmp_path.iterdir() if path != output]


def test_a_model_that_is_named_by_dots_has_its_pack_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "model" / "inside")
    for path in (Path(".."), Path("..").absolute(), Path("../inside/.."), Path("../../model")):
        assert PackOrder(model=path, to="int4").folder.resolve() == tmp_path / "model-int4"


def test_a_file_that_is_called_as_a_lock_would_be_is_left_alone(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    (tmp_path / "poetry.lock").write_text("versions of packages")
    packed(model_of(tiny_checkpoint), tmp_path / "poetry")
    assert {path.name for path in tmp_path.iterdir()} == {"poetry", "poetry.lock"}
    assert (tmp_path / "poetry.lock").read_text() == "versions of packages"


def test_tensors_without_numbers_are_copied_as_all_others(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    model = model_of(tiny_checkpoint)
    tensors = load_file(model / "model.safetensors")
    tensors |= {"a.nothing": torch.zeros(0, 4), "z.nothing": torch.zeros(2, 0)}
    save_file(tensors, model / "model.safetensors")
    packed(model, tmp_path / "out")
    after = Checkpoint.open(tmp_path / "out")
    assert after.extent("a.nothing").shape == (0, 4)
    assert after.extent("z.nothing").shape == (2, 0)


@pytest.mark.parametrize("to", ["int4", "int8", "fp8"])
def test_a_plan_supposes_what_a_pack_then_writes(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, to: Precision
) -> None:
    model, output = model_of(tiny_checkpoint), tmp_path / "out"
    before = open_model(model, "auto")
    packed(model, output, to)
    after = open_model(output, "auto").dtypes
    # So few scales of FP8 leave matrices where none is copied together with others.
    assert after.num_runs == (3 if to == "fp8" else 1)
    assert stored_as(before.dtypes, to, before.shape) == replace(after, num_runs=1)


@pytest.mark.parametrize("first", ["int4", "int8", "fp8"])
def test_experts_that_are_quantised_are_decoded_first(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, first: Precision
) -> None:
    packed(model_of(tiny_checkpoint), tmp_path / "first", first)
    second: Precision = "int8" if first == "fp8" else "fp8"
    summary = packed(tmp_path / "first", tmp_path / "second", second)
    assert all(0 < error < 0.03 for error in summary.record.relative_errors.values())
    names = Checkpoint.open(tmp_path / "second").tensors
    ends = {name.rsplit(".", 1)[1] for name in names if ".experts." in name}
    packed_ends = {"weight_packed", "weight_scale", "weight_shape"}
    assert ends == (packed_ends if second == "int8" else {"weight", "weight_scale_inv"})
    assert not open_model(tmp_path / "second", "auto").warnings


def test_other_weights_that_are_quantised_are_refused(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    model = write_quantised(model_of(tiny_checkpoint), "fp8", tmp_path / "fp8", dense=True)
    with pytest.raises(CheckpointError, match=r"weights outside the experts are quantised \("):
        packed(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "said"),
    [("gemma4_text", "several"), ("granitemoehybrid", "several"), ("gpt_oss", "biases")],
)
def test_no_width_is_blamed_where_nothing_can_be_written(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, family: str, said: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"{said}.*; this model cannot be packed"):
        packed(tiny_checkpoint(family), tmp_path / "out", "int4")


def test_an_expert_is_one_range_of_a_file(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    packed(model_of(tiny_checkpoint, dtype="bfloat16"), tmp_path / "out", group=32)
    checkpoint = Checkpoint.open(tmp_path / "out")
    ends = []
    for expert in range(8):
        prefix = f"model.layers.1.mlp.experts.{expert}."
        names = [name for name in checkpoint.tensors if name.startswith(prefix)]
        extents = [checkpoint.extent(name) for name in names if not name.endswith("_shape")]
        assert len({extent.path for extent in extents}) == 1
        begin, end = (min(e.offset for e in extents), max(e.offset + e.num_bytes for e in extents))
        assert end - begin == sum(extent.num_bytes for extent in extents)
        ends.append((begin, end))
    assert ends[0][0] % PAGE_BYTES == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))


def test_widths_of_whole_pages_begin_with_a_page(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 1}
    packed(tiny_checkpoint("qwen3_moe", dtype="bfloat16", **sizes), tmp_path / "out", group=64)
    checkpoint = Checkpoint.open(tmp_path / "out")
    for expert in range(8):
        name = f"model.layers.0.mlp.experts.{expert}.gate_proj.weight_packed"
        assert checkpoint.extent(name).offset % PAGE_BYTES == 0


@pytest.mark.parametrize(
    ("family", "to"),
    [
        ("kimi_linear", "fp8"),
        ("bailing_hybrid", "fp8"),
        *itertools.product(
            (
                *("mixtral", "qwen3_moe", "phimoe", "hy_v3", "lfm2_moe", "nemotron_h"),
                *("sarvam_moe", "minimax", "kolibri1", "flint", "jamba", "axk2", "mistral_large4"),
                *("dots3_note_text", "beam"),
            ),
            ("int4", "int8", "fp8"),
        ),
    ],
)
def test_transformers_loads_it_and_says_the_same(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, family: str, to: Precision
) -> None:
    source, output = model_of(tiny_checkpoint, family), tmp_path / "out"
    summary = packed(source, output, to)
    before, theirs = load(source), load(output)
    weights = dict(theirs.named_parameters())
    for name, weight in before.named_parameters():
        error = (weights[name] - weight).norm() / weight.norm()
        most = 1.5 * max(summary.record.relative_errors.values()) if ".experts." in name else 0.0
        assert error <= most, name
        assert (error > 0) == (".experts." in name), name
    ours = Driver(output).generate(PROMPTS, 8, slice_tokens=16, stagger=1)
    assert [seq.answer for seq in ours] == [greedy(theirs, prompt, 8)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("to", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("family", ["dbrx", "kimi_linear", "bailing_hybrid", "muse_spark"])
def test_experts_of_what_transformers_does_not_load_are_written_as_all_others(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, family: str, to: Precision, dtype: str
) -> None:
    """Of DBRX they lie transposed in flat stacks; of Kimi-Linear, whose convolutions transformers
    does not find beside integers, they are as they were; of Muse Spark it finds stacks alone."""
    source, output = model_of(tiny_checkpoint, family, dtype=dtype), tmp_path / "out"
    summary = packed(source, output, to)
    before, after = open_model(source, "auto"), open_model(output, "auto")
    assert before.experts.is_flat == (family == "dbrx") and not after.experts.is_stacked
    for key in before.expert_records():
        weights, found = matrices(before, key), matrices(after, key)
        for role, weight in weights.items():
            error = (found[role] - weight).norm() / weight.norm()
            assert 0 < error <= 1.5 * summary.record.relative_errors[key.layer], (key, role)
    assert all(len(seq.answer) == 2 for seq in Driver(output).generate(PROMPTS, 2))


def matrices(files: ModelFiles, key: ExpertKey) -> dict[str, torch.Tensor]:
    """Those of an expert by role, decoded."""
    pages = FilePages(files.expert_records())
    slot = Arena(pages.slot_bytes).bytes
    pages.load({key: slot})
    found = {}
    for role, matrix in files.experts.matrices(pages.tensors(key, slot), *key).items():
        if isinstance(matrix, StoredMatrix):
            out = torch.empty(matrix.shape)
            matrix.format.decode(matrix.parts, out)
            matrix = out
        found[role] = matrix.float()
    pages.close()
    return found


@pytest.mark.parametrize("kills", [1, 6])
@pytest.mark.few(kills=(6,))
def test_a_pack_that_is_killed_ends_with_the_same_bytes(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, kills: int
) -> None:
    model = model_of(tiny_checkpoint, max_shard_size="50KB")
    packed(model, tmp_path / "whole")
    noise, num_killed = random.Random(kills), 0
    while num_killed < kills:
        is_killed = _killed_at(noise.randrange(1, 14), model, tmp_path / "out")
        num_killed += is_killed
        if (tmp_path / "out").exists():
            assert set(bytes_of(tmp_path / "out")) - {"record"} == set(bytes_of(tmp_path / "whole"))
            break
    assert num_killed
    packed(model, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_half_a_record_is_no_part_of_what_is_packed(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    model = model_of(tiny_checkpoint)
    packed(model, tmp_path / "whole")
    for step in (1, 2, 4):
        assert _killed_at(step, model, tmp_path / "out", steps=[(Path, "replace")])
    packed(model, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")


def _killed_at(
    step: int, model: Path, output: Path, *, steps: Sequence[tuple[Any, str]] = _STEPS
) -> bool:
    """Packs in another process, which kills itself when it asks for something of the file system
    for that time; whether it got so far."""

    def run() -> None:
        left = itertools.count(step, -1)
        for owner, name in steps:
            usual = getattr(owner, name)

            def dying(*rest: object, usual: Callable[..., object] = usual) -> object:
                if next(left) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return usual(*rest)

            setattr(owner, name, dying)
        packed(model, output)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def test_what_is_written_is_not_written_again(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output, written = model_of(tiny_checkpoint), tmp_path / "out", []
    encode = Pack._encode

    def stopping(work: Pack, layer: int, *rest: object) -> float:
        if written:
            raise KeyboardInterrupt
        written.append(layer)
        return encode(work, layer, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Pack, "_encode", stopping)
    with pytest.raises(KeyboardInterrupt):
        packed(model, output)
    assert not output.exists()
    monkeypatch.setattr(Pack, "_encode", encode)
    said: list[str] = []
    Pack(PackOrder(model=model, to="int4", output=output), said.append).execute()
    assert said == ["1 of 3 files were written before"]


def test_a_pack_that_has_ended_is_not_written_again(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    model, output = model_of(tiny_checkpoint), tmp_path / "out"
    first = packed(model, output)
    times = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    second = packed(model, output)
    assert second.was_there
    assert second.record.relative_errors == first.record.relative_errors
    assert times == {path: path.stat().st_mtime_ns for path in output.rglob("*")}


def test_nothing_is_written_over_other_folders(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    model, output = model_of(tiny_checkpoint), tmp_path / "out"
    output.mkdir()
    with pytest.raises(ConfigError, match=r"out: is there, and is no pack of these weights"):
        packed(model, output)
    with pytest.raises(ConfigError, match=r"the folder .*none does not exist; make it first"):
        packed(model, tmp_path / "none" / "out")
    for taken in model, Path("/"):
        with pytest.raises(ConfigError, match="nothing is written over it"):
            packed(model, taken)
    packed(model, tmp_path / "int8", "int8")
    with pytest.raises(ConfigError, match="is no pack of these weights in this way"):
        packed(model, tmp_path / "int8", "int4")
    other = model_of(tiny_checkpoint, seed=1)
    with pytest.raises(ConfigError, match="is no pack of these weights"):
        packed(other, tmp_path / "int8", "int8")


def test_a_link_that_leads_elsewhere_is_said_before_anything_is_written(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(model_of(tiny_checkpoint), tmp_path / "model"))
    (tmp_path / "elsewhere").touch()
    (model / "notes").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="'notes' is a link that leads outside"):
        packed(model, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "elsewhere"}


def test_an_unfinished_pack_of_something_else_is_left_alone(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output = model_of(tiny_checkpoint), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Pack, "_finish", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            packed(model, output)
    kept = bytes_of(tmp_path / "out.packing")
    with pytest.raises(
        ConfigError, match=r"out.packing: holds an unfinished pack of something else"
    ):
        packed(model, output, "int8")
    assert bytes_of(tmp_path / "out.packing") == kept


def _interrupted(*rest: object) -> None:
    raise KeyboardInterrupt


def test_weights_that_are_no_numbers_are_refused(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    source = model_of(tiny_checkpoint)
    model = tmp_path / "model"
    model.mkdir()
    for path in source.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"][2, 5] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.3.up_proj.weight has weights"):
        packed(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_little_memory_is_said_before_anything_is_written(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    with pytest.raises(DoesNotFit, match=r"dram: packing needs .* raise --dram"):
        packed(model_of(tiny_checkpoint), tmp_path / "out", dram="1MiB")
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_it_costs(tiny_checkpoint: TinyCheckpoint, tmp_path: Path) -> None:
    model = model_of(tiny_checkpoint)
    done = moebatch("pack", model, "--to", "int4", "-o", tmp_path / "out", "--group", 32)
    assert done.returncode == 0, done.stderr
    assert "16 experts in int4: " in done.stderr
    assert "relative error" in done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert weights["group_size"] in GROUPS


def test_perplexity_is_measured_before_and_after(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The lamp counts 3 of the rivers. " * 40)
    order = PackOrder(
        model=model_of(tiny_checkpoint), to="int4", output=tmp_path / "out", text=text
    )
    first, second = Pack(order, print).execute(), Pack(order, print).execute()
    assert second.was_there
    assert first.perplexities == second.perplexities
    assert first.perplexities is not None
    before, after = first.perplexities
    assert before.num_tokens == after.num_tokens > 100
    assert 0 < abs(after.value / before.value - 1) < 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--to: is needed: int4, int8 or fp8"),
        (("--to", "int3"), "--to: must be one of int4, int8, fp8, got 'int3'"),
        (("--to", "int8", "--group", "64"), "--group: is 64 or 32, and for --to int4 only"),
        (("--to", "int4", "--dram", "much"), "--dram: "),
    ],
)
def test_options_that_make_no_sense_are_refused(options: tuple[str, ...], said: str) -> None:
    done = moebatch("pack", "nowhere", *options)
    assert done.returncode == 2
    assert said in done.stderr
