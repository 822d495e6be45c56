"""The same job with its experts in every format: bytes, seconds, what the plan said, peak memory.

    python -m tests.benchmarks.formats [--only FORMATS] [--dram SIZE]

The checkpoint is the first layers of that of `tests.benchmarks.jobs`; each format's is made of it,
once, as the tests make theirs.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from moebatch.units import format_bytes, parse_bytes
from tests.benchmarks.jobs.checkpoint import VOCABULARY, checkpoint
from tests.benchmarks.jobs.lengths import even
from tests.benchmarks.jobs.machine import command_in_words, commit, machine_in_words, today
from tests.benchmarks.jobs.rows import write_rows
from tests.benchmarks.jobs.run import Run, run_job
from tests.benchmarks.jobs.setting import Setting
from tests.quantised import KINDS, Kind, awq, fp8_blocks, gptq

_LAYERS = 2
_INDEX = "model.safetensors.index.json"
_ROWS = even(128, 32, 16)
_PLAIN = "bfloat16"
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_GPTQ = {"quant_method": "gptq", "group_size": 128}
_PUBLISHED: Mapping[str, Kind] = {
    "fp8, blocks of 128 x 128": Kind(fp8_blocks(128, 128), _FP8, ""),
    "int8, a scale for each row": KINDS["int8"],
    "mxfp8": KINDS["mxfp8"],
    "packed int8, groups of 32": KINDS["packed-int8"],
    "packed int4, groups of 32": KINDS["int4"],
    "packed int4, groups of 16, zero points": KINDS["int4-zeros"],
    "mxfp4": KINDS["packed-mxfp4"],
    "nvfp4": KINDS["packed-nvfp4"],
    "gptq int4, groups of 128": Kind(gptq(4, 128), _GPTQ | {"bits": 4}, ""),
    "gptq int4, order of its own": Kind(
        gptq(4, 128, ordered=True), _GPTQ | {"bits": 4, "desc_act": True}, ""
    ),
    "gptq int8, groups of 128": Kind(gptq(8, 128), _GPTQ | {"bits": 8}, ""),
    "awq int4, groups of 128": Kind(
        awq(128), {"quant_method": "awq", "bits": 4, "group_size": 128}, ""
    ),
    "bitsandbytes nf4": KINDS["bnb-nf4"],
    "bitsandbytes nf4, double quantisation": KINDS["bnb-nf4-nested"],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.formats")
    parser.add_argument("--only", help="formats, with semicolons between; default: all")
    parser.add_argument("--dram", type=parse_bytes, default=parse_bytes("1.25GiB"))
    parser.add_argument(
        "--folder", type=Path, default=Path.home() / ".cache" / "moebatch" / "benchmark"
    )
    options = parser.parse_args()
    source = checkpoint(options.folder)
    setting = Setting(
        folder=options.folder,
        checkpoint=source,
        cap_bytes=options.dram + parse_bytes("0.2GiB"),
        dram_bytes=options.dram,
    )
    print(f"`{command_in_words()}`, commit {commit()}, {today()}")
    print(f"{machine_in_words()}; `resources.dram: {format_bytes(options.dram)}`\n", flush=True)
    if not setting.profile.is_file():
        setting.measure_machine()
    rows = options.folder / "formats" / "rows.jsonl"
    rows.parent.mkdir(exist_ok=True)
    write_rows(rows, _ROWS, VOCABULARY)
    print("| experts | weights | measured | predicted | read | generated tok/s | peak memory |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    names = options.only.split(";") if options.only else [_PLAIN, *_PUBLISHED]
    for name in names:
        folder = _made(source, options.folder / "formats" / name.replace(" ", "-"), name)
        print(_line(name, folder, run_job(replace(setting, checkpoint=folder), rows)), flush=True)


def _made(source: Path, folder: Path, name: str) -> Path:
    """The checkpoint of a format; its index is written last."""
    if (folder / _INDEX).is_file():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in source.glob("*.json"):
        if path.name not in ("config.json", _INDEX):
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": _LAYERS}
    if name != _PLAIN:
        config["quantization_config"] = dict(_PUBLISHED[name].config)
    (folder / "config.json").write_text(json.dumps(config))
    files = json.loads((source / _INDEX).read_text())["weight_map"]
    layers = [f"model.layers.{layer}." for layer in range(_LAYERS)]
    kept = {f for t, f in files.items() if "layers" not in t or t.startswith(tuple(layers))}
    index: dict[str, str] = {}
    for file in sorted(kept):
        tensors = {}
        for weight, tensor in load_file(source / file).items():
            if name == _PLAIN or "experts" not in weight:
                tensors[weight] = tensor
                continue
            parts, _ = _PUBLISHED[name].store(tensor.float())
            for suffix, part in parts.items():
                base = weight.removesuffix(".weight") if suffix.startswith(".") else weight
                tensors[base + suffix] = part.contiguous()
        save_file(tensors, folder / file)
        index |= dict.fromkeys(tensors, file)
    (folder / _INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


def _line(name: str, folder: Path, run: Run) -> str:
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    generated = sum(_ROWS.answers) / run.passes_s
    predicted = "–" if run.predicted_s is None else f"{run.predicted_s:.1f} s"
    return (
        f"| {name} | {format_bytes(weights)} | {run.passes_s:.1f} s | {predicted} | "
        f"{format_bytes(int(run.summary['bytes_read']))} | {generated:.0f} | "
        f"{format_bytes(run.peak_bytes)} |"
    )


if __name__ == "__main__":
    main()
