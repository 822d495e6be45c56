"""Compiles the kernels in Triton as they are launched, for GPUs that nobody has here, and prints
what came of it as JSON.

A program of its own: tests have Triton interpret.
"""

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moebatch.formats.coded import CodedMatrix
from moebatch.layout.fused import Middle
from moebatch.model.gpu import kernels
from moebatch.model.gpu.attention import attend_single
from moebatch.model.gpu.check import CODES, ROUTERS, Codes, coded
from moebatch.model.gpu.delta_steps import take_delta_steps
from moebatch.model.gpu.experts import GroupedExperts
from moebatch.model.gpu.gates import GpuGates
from moebatch.model.gpu.rows import GpuRows
from moebatch.model.gpu.scan_steps import take_scan_steps
from moebatch.model.grouped import GroupedExpert
from moebatch.model.native.attention_work import Cached, SingleQueries
from moebatch.model.native.delta_rule import DeltaInput, StateSpans
from moebatch.model.native.scoring import Scoring
from moebatch.model.native.selective_scan import ScanInput
from moebatch.model.routing.router import Routing
from moebatch.model.routing.tokens import ExpertTokens
from moebatch.model.scratch import Frame
from moebatch.spec.model.blocks import ClampedGate
from tests.gpu_kernels import use_launch

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
}
_ALIGNED = 16
_CLAMPED = ClampedGate(limit=7.0, alpha=1.7, added=1.0)
_TOKENS, _HIDDEN, _WIDTH = 100, 2048, 768
_EXPERTS = 384
"""Of which groups are no power of two, and most numbers are held that a model with groups has."""
_HEAD = 256
"""The largest that `attends_in_place` lets pass."""
Launch = tuple[str, tuple[Any, ...], Mapping[str, Any]]


def launches(dtype: torch.dtype) -> list[Launch]:
    """What each kernel is given where a model of usual sizes computes in that type."""
    found: list[Launch] = []

    def record(name: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        assert all(grid), "something is to be computed"
        found.append((name, arguments, constants))

    x, rows = torch.empty(_TOKENS, _HIDDEN, dtype=dtype), torch.arange(_TOKENS)
    tokens, outputs = ExpertTokens(rows, rows % 2), x.new_empty(_TOKENS, 2, _HIDDEN)
    weights = torch.empty(_TOKENS, 2)
    heads = x.new_empty(_TOKENS, 16, _HEAD)
    angles = x.new_empty(_TOKENS, _HEAD // 2)
    with pytest.MonkeyPatch.context() as patch:
        use_launch(patch, record)
        by_rows = GpuRows()
        by_rows.rms_norm(x, x[0], 1e-6, x)
        by_rows.rotate(heads, angles, angles)
        by_rows.norm_gated(heads.float(), heads[0, 0], 1e-6, heads, heads)
        for clamped in (None, _CLAMPED):
            by_rows.gate(x, x, clamped)
        by_rows.place(x, tokens, outputs, weights)
        by_rows.add(x, 1.0, outputs, x)
        for num_rows in (10, 30, _TOKENS):
            _run_experts(x, ExpertTokens(rows[:num_rows], rows[:num_rows] % 2), outputs, weights)
        _run_experts(x, tokens, outputs, weights, middle="relu2")
        for codes in CODES if dtype == torch.bfloat16 else CODES[1:2]:
            _run_experts(x, tokens, outputs, weights, codes)
        cache = x.new_empty(2, 500, 2, _HEAD)
        seen = SingleQueries(rows[:1], torch.tensor([0, 90]), torch.arange(90))
        for scores in (None, torch.empty(16)):
            scoring = Scoring(1.0, None, scores)
            attend_single(seen, heads, Cached(*cache), heads, scoring)
        kept_in = torch.float16 if dtype == torch.float16 else torch.float32
        _take_steps(kept_in)
        _scan(kept_in)
        logits = x.new_empty(_TOKENS, _EXPERTS)
        choices = weights, torch.empty(_TOKENS, 2, dtype=torch.int64)
        by_expert = torch.empty(_EXPERTS)
        by_role = {"router_correction": by_expert, "router_expert_weights": by_expert}
        for router in ROUTERS:
            GpuGates().choose(logits, router, choices, by_role, dtype)
        GpuGates().group(choices[1], slice(1, _TOKENS), _EXPERTS, counts={})
    return found


def _take_steps(kept_in: torch.dtype) -> None:
    """Of heads as Qwen3-Next has them, and as Kimi-Linear."""
    spans = StateSpans(*torch.zeros(4, 2, dtype=torch.int64))
    rates, v = torch.empty(2, 32), torch.empty(2, 32, 128)
    q = v[:, :16].contiguous()
    matrices = torch.empty(2, 32, 128, 128, dtype=kept_in)
    given, out = DeltaInput(q, q, v, rates, rates[..., None]), torch.empty_like(v)
    for corrects in (True, False):
        take_delta_steps(spans, given, matrices, out, corrects=corrects)
    by_channel = DeltaInput(v, v, v, rates, torch.empty_like(v))
    take_delta_steps(spans, by_channel, matrices, out, corrects=True)


def _scan(kept_in: torch.dtype) -> None:
    """Of channels as Jamba Mini has them."""
    spans, (keys, channels) = StateSpans(*torch.zeros(4, 2, dtype=torch.int64)), (16, 8192)
    k, v = torch.empty(9, keys), torch.empty(9, channels)
    given = ScanInput(k, k, v, v, torch.empty(keys, channels))
    take_scan_steps(spans, given, torch.empty(2, 1, keys, channels, dtype=kept_in), v)


def _run_experts(
    x: Tensor,
    tokens: ExpertTokens,
    outputs: Tensor,
    weights: Tensor,
    codes: Codes | None = None,
    middle: Middle = "gated",
) -> None:
    """Those of codes as gpt-oss has them, with biases."""
    routing = Routing(
        rows=(slice(0, len(x)),),
        normed_TD=x,
        weights_TK=weights,
        experts_TK=torch.zeros(weights.shape, dtype=torch.int64),
        num_experts=1,
        tokens={0: tokens},
        outputs_TKD=outputs,
    )
    sizes = {"gate": (_WIDTH, _HIDDEN), "up": (_WIDTH, _HIDDEN), "down": (_HIDDEN, _WIDTH)}
    matrices: dict[str, Tensor | CodedMatrix] = {
        role: coded(codes, size, x.device) if codes else x.new_empty(size)
        for role, size in sizes.items()
    }
    if middle == "relu2":
        del matrices["gate"]
    if codes:
        matrices |= {f"{role}_bias": x.new_empty(size[0]) for role, size in sizes.items()}
    kernels = GroupedExperts(middle)
    taken = kernels.taken(matrices, x.dtype)
    assert taken is not None, "they suit"
    frame = Frame(x.new_empty(_TOKENS * _WIDTH))
    group, clamped = [GroupedExpert(tokens, taken)], _CLAMPED if codes else None
    kernels.run(frame, group, routing, most_rows=_TOKENS, clamped=clamped)


def source_of(name: str, arguments: tuple[Any, ...], constants: Mapping[str, Any]) -> ASTSource:
    """The kernel as it would be compiled at that launch."""
    kernel = getattr(kernels, name)
    names = list(inspect.signature(kernel.fn).parameters)
    given = dict(zip(names, arguments, strict=False))
    compiled_for = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    any_value = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    given |= {n: value for n, value in constants.items() if n not in compiled_for}
    constants = {n: value for n, value in constants.items() if n in compiled_for}
    ones = {
        n: 1
        for n, value in given.items()
        if isinstance(value, int) and value == 1 and n not in any_value
    }
    fixed = {**constants, **ones}
    aligned = {
        (names.index(each),): [["tt.divisibility", _ALIGNED]]
        for each, value in given.items()
        if each not in {*fixed, *any_value} and _is_aligned(value)
    }
    return ASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in fixed else _type_of(given[n]) for n in names},
        constexprs=fixed,
        attrs=aligned,
    )


def _type_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and value % _ALIGNED == 0)


def compiled(source: ASTSource, capability: int) -> dict[str, int]:
    """Bytes of shared memory, and how many loads are of single numbers of 8 and of 16 bits."""
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    text = made.asm["ptx"]
    return {
        "shared_bytes": made.metadata.shared,
        "loads_of_8_bits": text.count("ld.global.b8"),
        "loads_of_16_bits": text.count("ld.global.b16"),
        "tensor_cores": text.count("mma.sync") + text.count("wgmma.mma"),
        "code_bytes": len(made.asm["cubin"]),
    }


def all_of(dtype: torch.dtype, capability: int) -> Iterator[dict[str, Any]]:
    """Each kernel as it is launched where a model computes in that type."""
    for name, arguments, constants in launches(dtype):
        made = compiled(source_of(name, arguments, constants), capability)
        coding = constants.get("coding")
        yield {
            "kernel": name,
            "type": _TYPES[dtype],
            "numbers": None if coding is None else coding.numbers,
            "capability": capability,
            **made,
        }


def main(asked: list[str]) -> None:
    """Of types with a compute capability each, such as ``fp16-90``."""
    dtypes = {name: dtype for dtype, name in _TYPES.items()}
    pairs = [each.split("-") for each in asked]
    found = [made for name, of in pairs for made in all_of(dtypes[name], int(of))]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
