"""Experts in one call of the compiled products: bit for bit what each gives step by step."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moebatch.formats.ggml import GgmlRows
from moebatch.formats.weight_format import Matrix, WeightFormat
from moebatch.layout.fused import MOST_TOGETHER, Middle
from moebatch.layout.scratch import Limits, step_elements
from moebatch.model import elementwise as elementwises
from moebatch.model.elementwise import Elementwise
from moebatch.model.experts import CompiledExperts
from moebatch.model.families.usual import mlp
from moebatch.model.grouped import GroupedExpert
from moebatch.model.native.instruction_set import InstructionSet
from moebatch.model.native.kernels import Kernels
from moebatch.model.native.rows import NativeRows
from moebatch.model.operators import Operators
from moebatch.model.products import Products
from moebatch.model.routing.router import Routing
from moebatch.model.routing.tokens import group_by_expert
from moebatch.model.scratch import Frame
from moebatch.spec.model.blocks import ClampedGate, Mlp
from tests.few import examples
from tests.model.test_codes import CODED, GGML, stored_matrix
from tests.model.test_products import CPU, DTYPES, noise
from tests.native import HERE, SETS, kernels_of
from tests.plan.problems import SMALL

CLAMPED = (
    ClampedGate(limit=0.7, alpha=1.7, added=1.0),
    ClampedGate(limit=0.4, clamps_activated=True),
)
MIDDLES: Sequence[tuple[Middle, ClampedGate | None]] = (
    *(("gated", clamped) for clamped in (None, *CLAMPED)),
    ("relu", None),
    ("relu2", None),
)
"""What comes between products."""
ACTIVATIONS = {"gated": "silu", "relu": "relu", "relu2": "relu2"}
"""The same, as `Elementwise` is told."""
ROOM = 2**22
Experts = Mapping[int, Mapping[str, Matrix]]


def forced(name: InstructionSet) -> Kernels:
    """Kernels that multiply whatever they know, on every processor."""
    kernels = copy.copy(kernels_of(name))
    kernels.is_forced = True
    return kernels


def routing_of(num_tokens: int, num_experts: int, hidden: int, dtype: torch.dtype) -> Routing:
    generator = torch.Generator().manual_seed(num_tokens)
    num_choices = min(2, num_experts)
    logits_TE = torch.rand(num_tokens, num_experts, generator=generator)
    weights_TK, experts_TK = logits_TE.topk(num_choices)
    return Routing(
        rows=(slice(0, num_tokens),),
        normed_TD=noise(5, num_tokens, hidden).to(dtype),
        weights_TK=weights_TK,
        experts_TK=experts_TK,
        num_experts=num_experts,
        tokens=group_by_expert(experts_TK, slice(0, num_tokens), num_experts),
        outputs_TKD=torch.full((num_tokens, num_choices, hidden), torch.nan, dtype=dtype),
    )


def step_by_step(
    kernels: Kernels,
    routing: Routing,
    experts: Experts,
    middle: Middle = "gated",
    clamped: ClampedGate | None = None,
) -> Tensor:
    """What experts make one after the other, by the functions of shared experts."""
    dtype, out_TKD = routing.normed_TD.dtype, torch.zeros_like(routing.outputs_TKD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elementwises, "_kernels_on", lambda device: NativeRows(kernels))
        elementwise = Elementwise(ACTIVATIONS[middle], CPU).clamping(clamped)
    operators = Operators(Products(CPU, dtype, kernels=kernels), elementwise)
    for number, tokens in routing.tokens.items():
        frame, x_MD = Frame(torch.empty(ROOM, dtype=dtype)), routing.normed_TD[tokens.rows_M]
        y_MD = mlp(frame, x_MD, len(x_MD), experts[number], operators)
        operators.elementwise.place(y_MD, tokens, out_TKD, routing.weights_TK)
    return out_TKD


def together(
    kernels: Kernels,
    routing: Routing,
    experts: Experts,
    middle: Middle = "gated",
    most_rows: int = 1000,
    frame: Frame | None = None,
    clamped: ClampedGate | None = None,
) -> Tensor:
    """What they make in one call, or in portions."""
    dtype = routing.normed_TD.dtype
    grouped, found = CompiledExperts(Products(CPU, dtype, kernels=kernels), middle), []
    for number, tokens in routing.tokens.items():
        taken = grouped.taken(experts[number], dtype)
        assert taken is not None, "the kernels know it"
        found.append(GroupedExpert(tokens, taken))
    frame = frame or Frame(torch.empty(ROOM, dtype=dtype))
    grouped.run(frame, found, routing, most_rows=most_rows, clamped=clamped)
    return routing.outputs_TKD


def plain(
    num_experts: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    *,
    has_biases: bool = False,
    middle: Middle = "gated",
) -> Experts:
    """Biases lie with gaps between, as those of gates and their neighbours do."""
    experts: dict[int, dict[str, Matrix]] = {}
    for number in range(num_experts):
        expert = experts[number] = {}
        for place, (role, (rows, columns)) in enumerate(sizes(hidden, width, middle).items()):
            expert[role] = (noise(10 * number + place, rows, columns) * 0.2).to(dtype)
            if has_biases:
                expert[f"{role}_bias"] = noise(10 * number + place + 5, rows, 2).to(dtype)[:, 0]
    return experts


def sizes(hidden: int, width: int, middle: Middle = "gated") -> Mapping[str, tuple[int, int]]:
    gate = {"gate": (width, hidden)} if middle == "gated" else {}
    return {**gate, "up": (width, hidden), "down": (hidden, width)}


@pytest.mark.parametrize("name", SETS)
@examples(60)
@given(
    num_tokens=st.one_of(st.integers(1, 40), st.sampled_from([129, 300])),
    num_experts=st.integers(1, 5),
    hidden=st.sampled_from([1, 16, 33, 100, 2100]),
    width=st.sampled_from([1, 31, 64, 505]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    weight_dtype=st.sampled_from(DTYPES),
    between=st.sampled_from(MIDDLES),
    most_rows=st.sampled_from([7, 50, 1000]),
    num_threads=st.integers(1, 3),
    has_biases=st.booleans(),
)
def test_experts_together_give_the_bits_of_each_step_by_step(
    name: InstructionSet,
    num_tokens: int,
    num_experts: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    between: tuple[Middle, ClampedGate | None],
    most_rows: int,
    num_threads: int,
    has_biases: bool,
) -> None:
    middle, clamped = between
    kernels, before = forced(name), torch.get_num_threads()
    routing = routing_of(num_tokens, num_experts, hidden, dtype)
    experts = plain(num_experts, hidden, width, weight_dtype, has_biases=has_biases, middle=middle)
    try:
        torch.set_num_threads(num_threads)
        found = together(kernels, routing, experts, middle, most_rows, clamped=clamped)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, step_by_step(kernels, routing, experts, middle, clamped))


def test_a_call_has_room_for_the_biases_of_as_many_experts_as_go_together() -> None:
    """Wide experts of few tokens, so that biases are most of what lies in a step's frame."""
    width, hidden, most_rows = 300, 16, MOST_TOGETHER
    shape = replace(
        SMALL, hidden_size=hidden, expert=Mlp(width=width, bias=True), shared_expert=None
    )
    limits = Limits(
        pass_tokens=1, micro_batch_tokens=1, context_tokens=1, gather_rows=1, expert_rows=most_rows
    )
    routing = routing_of(MOST_TOGETHER, MOST_TOGETHER, hidden, torch.float32)
    each = group_by_expert(
        torch.arange(MOST_TOGETHER)[:, None], slice(0, MOST_TOGETHER), MOST_TOGETHER
    )
    routing = replace(routing, tokens=each)
    experts = plain(MOST_TOGETHER, hidden, width, torch.float32, has_biases=True)
    frame = Frame(torch.empty(step_elements(shape, limits)))
    kernels = forced(HERE[0])
    found = together(kernels, routing, experts, most_rows=most_rows, frame=frame)
    assert torch.equal(found[:, 0], step_by_step(kernels, routing, experts)[:, 0])


@pytest.mark.parametrize("stored", [*CODED, *GGML], ids=lambda stored: stored.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("middle", ["gated", "relu2"])
def test_experts_in_every_format_of_codes_give_the_bits_of_each(
    stored: WeightFormat, dtype: torch.dtype, middle: Middle
) -> None:
    kernels, I = forced(HERE[0]), 256 if isinstance(stored, GgmlRows) else 96
    experts = {
        number: {role: stored_matrix(stored, size) for role, size in sizes(I, I, middle).items()}
        for number in range(3)
    }
    routing = routing_of(40, 3, I, dtype)
    found = together(kernels, routing, experts, middle)
    assert torch.equal(found, step_by_step(kernels, routing, experts, middle))


@pytest.mark.parametrize(
    ("others", "dtype"),
    [
        ({}, torch.float16),
        ({"up": noise(1, 8, 16).bfloat16()}, torch.float32),
        ({"up": noise(1, 16, 8).t()}, torch.float32),
    ],
)
def test_other_experts_are_left_to_steps(others: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Numbers that rows are not gated in, gates stored otherwise, and matrices across."""
    grouped = CompiledExperts(Products(CPU, dtype, kernels=forced(HERE[0])))
    known = plain(1, 16, 8, torch.float32)[0]
    assert grouped.taken(known, torch.float32) is not None
    assert grouped.taken(MappingProxyType({**known, **others}), dtype) is None


@pytest.mark.parametrize("kernels", [None, "amx"])
def test_experts_are_left_to_the_library_where_it_multiplies(
    kernels: InstructionSet | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = Products(CPU, torch.bfloat16, kernels=kernels_of(HERE[0]))
    if kernels is None:
        products._kernels = None
    else:
        monkeypatch.setattr(Products, "instruction_set", kernels)
        monkeypatch.setattr(products._kernels, "is_forced", False)
        monkeypatch.setattr(products._kernels, "instruction_set", kernels)
    known = plain(1, 16, 8, torch.bfloat16)[0]
    assert CompiledExperts(products).taken(known, torch.bfloat16) is None
