"""What plans say of every model shape that comes with moebatch, on three machines, as a table.

    python -m tests.benchmarks.models [--only SHAPES]

Nothing is measured: the figures are those of `moebatch plan`.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence

from moebatch.layout.footprint import dense_bytes
from moebatch.plan.question import stated_dtypes
from moebatch.spec.files.library import names
from moebatch.spec.model.models import ModelEntry, load_model
from moebatch.units import format_bytes
from tests.command import moebatch
from tests.shapes import stored_bytes

_WORK = ("--prompt-len", "512", "--gen-len", "256", "--requests", "2000")
_MACHINES: Mapping[str, Sequence[str]] = {
    "T4, 192 GB": ("--hw", "t4"),
    "RTX 4090, 128 GB": ("--hw", "rtx4090"),
    "two cores, 16 GiB": ("--hw", "generic-cpu", "--what-if", "disk->dram=2GB/s"),
}


def main(only: Iterable[str]) -> None:
    """Prints a row for each shape."""
    print(f"| model | stored | outside experts | {' | '.join(_MACHINES)} |")
    print("| --- " * (3 + len(_MACHINES)) + "|")
    for shape in only:
        print(f"| {' | '.join(_row(shape))} |", flush=True)


def _row(name: str) -> list[str]:
    model = load_model(name)
    speeds = [_planned(name, asked) for asked in _MACHINES.values()]
    return [model.name, format_bytes(_stored(model)), format_bytes(_dense(model)), *speeds]


def _dense(model: ModelEntry) -> float:
    return dense_bytes(model.shape, stated_dtypes(model.shape))


def _stored(model: ModelEntry) -> float:
    shape = model.shape
    experts = len(shape.moe_layers) * shape.num_experts * stored_bytes(shape)
    return experts + shape.resident_params * shape.dtype_bytes


def _planned(name: str, asked: Sequence[str]) -> str:
    done = moebatch("plan", *asked, "--model", name, *_WORK, "--json")
    if done.returncode:
        return "does not fit"
    found = json.loads(done.stdout)["prediction"]
    speed = found["tokens_per_s"]
    shown = f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"
    return f"{shown} tok/s, {found['bottleneck']}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=names("models"))
    main(parser.parse_args().only)
