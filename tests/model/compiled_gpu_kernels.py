"""Compiles the kernels in Triton for GPUs that nobody has here, and prints what came of it as JSON.

A program of its own: tests have Triton interpret.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moebatch.model.gpu import kernels

_ALIGNED = ("D", "F", "stride", "width", "q_row", "out_row", "key_row", "value_row", "head_dim")
_ROW = {"width": "i32"}
_GATE = {"limit": "fp32", "alpha": "fp32"}


def works(number: str) -> dict[str, tuple[dict[str, str], dict[str, object]]]:
    """By kernel: types of what it is given, and constants."""
    rows, wide = f"*{number}", {"precision": "ieee", "N": 64, "I": 128 * 8 // int(number[-2:])}
    sizes = {"D": "i32", "F": "i32"}
    return {
        "norm": (
            {"out": rows, "x": rows, "weight": rows, "stride": "i32", "eps": "fp32", **_ROW},
            {"is_exact": False, "block": 2048},
        ),
        "rotate": (
            {"x": rows, "cos": rows, "sin": rows, "stride": "i32", "part_stride": "i32", **_ROW},
            {"block": 64},
        ),
        "gate_rows": (
            {"gate": rows, "up": rows, "count": "i32", **_GATE},
            {"is_clamped": True, "block": 1024},
        ),
        "place": (
            {
                "outputs": rows,
                "y": rows,
                "weights": "*fp32",
                "rows": "*i64",
                "choices": "*i64",
                "num_choices": "i32",
                **_ROW,
            },
            {"block": 2048},
        ),
        "add": (
            {"x": rows, "first": rows, "second": rows, "num_parts": "i32", **_ROW, "scale": "fp32"},
            {"has_second": True, "block": 2048},
        ),
        "experts_in": (
            {"inner": rows, "x": rows, "table": "*i64", "stride": "i32", **sizes, **_GATE},
            {"is_clamped": False, "M": 64, **wide},
        ),
        "experts_out": (
            {
                "outputs": rows,
                "inner": rows,
                "weights": "*fp32",
                "table": "*i64",
                "num_choices": "i32",
                **sizes,
            },
            {"M": 16, **wide},
        ),
        "attend_single": (
            {
                "out": rows,
                "q": rows,
                "keys": rows,
                "values": rows,
                "tokens": "*i64",
                "starts": "*i64",
                "rows": "*i64",
                "sink_scores": "*fp32",
                **dict.fromkeys(("q_row", "out_row", "key_row", "value_row"), "i32"),
                "num_shared": "i32",
                "head_dim": "i32",
                "scale": "fp32",
            },
            {
                "has_sink_scores": True,
                "precision": "ieee",
                "H": 16,
                "S": 32 if number == "fp32" else 64,
                "C": 256,
            },
        ),
    }


def compiled(name: str, number: str, capability: int) -> dict[str, int]:
    """Bytes of shared memory, and how many loads are of single numbers of 16 bits."""
    given, constants = works(number)[name]
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (argument, kind) in enumerate(given.items())
        if kind.startswith("*") or argument in _ALIGNED
    }
    source = ASTSource(
        fn=getattr(kernels, name),
        signature={**given, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs=aligned,
    )
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    text = made.asm["ptx"]
    tensor_cores = text.count("mma.sync") + text.count("wgmma.mma")
    return {
        "shared_bytes": made.metadata.shared,
        "loads_of_16_bits": text.count("ld.global.b16"),
        "tensor_cores": tensor_cores,
        "code_bytes": len(made.asm["cubin"]),
    }


def main() -> None:
    """For each of the compute capabilities that are given, such as 90."""
    found = {
        f"{name} {number} {capability}": compiled(name, number, int(capability))
        for capability in sys.argv[1:]
        for number in ("bf16", "fp16", "fp32")
        for name in works(number)
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
