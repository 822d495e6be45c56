"""The steps of a layer taken apart: by micro-batch, in other orders, on other threads."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moebatch.layout.scratch import attention_core_elements
from moebatch.model.batch import MicroBatch
from moebatch.model.routing.router import Routing
from moebatch.model.routing.tokens import group_by_expert
from moebatch.model.scratch import Frame, Scratch
from tests import tiny
from tests.model import oracle
from tests.model.cases import CASES
from tests.model.driver import Driver
from tests.model.ways import ApartDriver, CgoPipeDriver, rows_of

Checkpoint = Callable[..., Path]
WAYS = [ApartDriver, CgoPipeDriver]
NUM_NEW = 8


@pytest.mark.few
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "case", ["mixtral", "mixtral-window", "qwen2", "qwen2-mlp-only", "qwen3", "olmoe", "olmoe-clip"]
)
def test_greedy_tokens_are_those_of_transformers(
    case: str, way: type[Driver], tiny_checkpoint: Checkpoint
) -> None:
    """Prompts in slices, of which one micro-batch may need what the one before has written."""
    family, options = CASES[case]
    folder = tiny_checkpoint(family, **options)
    model = oracle.load(folder)
    seqs = way(folder).generate(
        oracle.prompts(), NUM_NEW, slice_tokens=31, span_tokens=13, micro_batch=2, stagger=1
    )
    for seq in seqs:
        tokens, logits = oracle.greedy(model, seq.prompt, NUM_NEW)
        assert seq.answer == tokens
        torch.testing.assert_close(torch.stack(seq.logits), logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_a_step_is_not_for_are_never_looked_at(
    way: type[Driver], tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in all scratch, before every step, reaches no result."""
    folder = tiny_checkpoint("qwen2_moe", mlp_only_layers=[1])
    want = Driver(folder).generate(oracle.prompts(), 3)
    monkeypatch.setattr(Scratch, "frame", lambda self: Frame(self.buffer.fill_(torch.nan)))
    seqs = way(folder).generate(oracle.prompts(), 3, micro_batch=1)
    assert [seq.answer for seq in seqs] == [seq.answer for seq in want]


@pytest.mark.parametrize("family", (*tiny.GROUPED, *tiny.RECURRENT))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_parts_of_attention_are_the_whole_bit_for_bit(
    family: str, dtype: torch.dtype, tiny_checkpoint: Checkpoint
) -> None:
    driver = ApartDriver(tiny_checkpoint(family), dtype=dtype)
    decoder = driver.decoder
    x_TD, (micro, *_) = laid_out(driver)
    whole, spare = x_TD.clone(), x_TD.clone()
    decoder.attend(1, whole, micro, driver.cached[1])
    before = [part.clone() for part in driver.cached[1]]
    for part in driver.cached[1]:
        part.fill_(torch.nan)

    qkv = decoder.project(1, x_TD, micro)
    _, out_THV = driver.buffers(1, micro)
    driver.attend(1, qkv, micro, out_THV)
    decoder.add_attention(1, x_TD, micro, out_THV)
    assert torch.equal(x_TD, whole)
    for now, then in zip(driver.cached[1], before, strict=True):
        assert torch.equal(now.nan_to_num(), then.nan_to_num())

    room, out_NHV = driver.buffers(1, micro)
    filled = decoder.project(1, spare, micro, into=room)
    assert filled.q_THC.data_ptr() == room.q_THC.data_ptr()
    assert {len(tensor) for tensor in filled.tensors} == {micro.num_tokens}
    driver.attend(1, room, micro, out_NHV)
    decoder.add_attention(1, spare, micro, out_NHV)
    assert torch.equal(spare, whole)
    assert out_NHV[micro.num_tokens :].isnan().all(), "rows beyond the micro-batch"


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_routing_by_micro_batch_is_routing_at_once(
    family: str, tiny_checkpoint: Checkpoint
) -> None:
    driver = Driver(tiny_checkpoint(family))
    layer = driver.shape.moe_layers[0]
    x_TD, micro_batches = laid_out(driver)
    first, *others = micro_batches
    assert len(others) > 1
    whole = driver.decoder.route(layer, x_TD)
    weights_TK, experts_TK = whole.weights_TK.clone(), whole.experts_TK.clone()
    normed_TD = whole.normed_TD.clone()
    joined = Routing.join([driver.decoder.route(layer, x_TD, rows_of(m)) for m in [*others, first]])
    assert joined.rows == whole.rows == (slice(0, len(x_TD)),)
    assert torch.equal(joined.experts_TK, experts_TK)
    torch.testing.assert_close(joined.weights_TK, weights_TK)
    torch.testing.assert_close(joined.normed_TD, normed_TD)
    assert joined.experts == whole.experts
    for expert in whole.experts:
        for now, at_once in zip(joined.tokens[expert], whole.tokens[expert], strict=True):
            assert torch.equal(now, at_once)


def test_a_routing_is_valid_until_its_own_rows_are_routed_again(
    tiny_checkpoint: Checkpoint,
) -> None:
    """One micro-batch goes through two layers while the others wait between gate and experts."""
    driver = Driver(tiny_checkpoint("qwen2_moe"))
    decoder = driver.decoder
    x_TD, micro_batches = laid_out(driver)
    want = x_TD.clone()
    for layer in (0, 1):
        routing = decoder.route(layer, want)
        driver.run_experts(layer, routing)
        decoder.combine(layer, want, routing)

    first, *others = [decoder.route(0, x_TD, rows_of(micro)) for micro in micro_batches]
    untouched = x_TD[micro_batches[0].stop :].clone()
    driver.run_experts(0, first)
    decoder.combine(0, x_TD, first)
    ahead = decoder.route(1, x_TD, *first.rows)
    driver.run_experts(1, ahead)
    decoder.combine(1, x_TD, ahead)
    assert torch.equal(x_TD[micro_batches[0].stop :], untouched)
    behind = Routing.join(others)
    driver.run_experts(0, behind)
    decoder.combine(0, x_TD, behind)
    behind = decoder.route(1, x_TD, *behind.rows)
    driver.run_experts(1, behind)
    decoder.combine(1, x_TD, behind)
    torch.testing.assert_close(x_TD, want)


@given(data=st.data(), num_tokens=st.integers(1, 40), num_experts=st.integers(1, 9))
def test_any_routings_can_be_joined(data: st.DataObject, num_tokens: int, num_experts: int) -> None:
    """Some of the rows, cut anywhere, in any order, with gaps."""
    num_chosen = data.draw(st.integers(1, min(3, num_experts)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    experts_TK = scores.topk(num_chosen, dim=-1).indices
    bounds = [0, *sorted(data.draw(st.sets(st.integers(1, num_tokens), max_size=6)))]
    cuts = [slice(*pair) for pair in pairwise(bounds)] or [slice(0, 1)]
    parts = data.draw(st.lists(st.sampled_from(cuts), min_size=1, unique_by=lambda s: s.start))
    joined = Routing.join([routing_of(experts_TK, rows, num_experts) for rows in parts])

    inside_T = torch.zeros(num_tokens, dtype=torch.bool)
    for rows in parts:
        inside_T[rows] = True
    assert torch.cat([torch.arange(num_tokens)[rows] for rows in joined.rows]).tolist() == (
        inside_T.nonzero().flatten().tolist()
    )
    assert joined.experts == tuple(experts_TK[inside_T].unique().tolist())
    for expert, (rows_M, choices_M) in joined.tokens.items():
        want_rows, want_choices = torch.where((experts_TK == expert) & inside_T[:, None])
        assert torch.equal(rows_M, want_rows) and torch.equal(choices_M, want_choices)


def test_a_row_cannot_be_joined_twice() -> None:
    experts_TK = torch.zeros(4, 1, dtype=torch.int64)
    routings = [routing_of(experts_TK, rows, 2) for rows in (slice(0, 3), slice(2, 4))]
    with pytest.raises(AssertionError, match="routed twice"):
        Routing.join(routings)


def test_a_core_is_priced(tiny_checkpoint: Checkpoint) -> None:
    driver = ApartDriver(tiny_checkpoint("olmoe"))
    elements = attention_core_elements(driver.shape, driver.limits)
    assert driver.core.scratch_bytes == elements * torch.float32.itemsize


def routing_of(experts_TK: torch.Tensor, rows: slice, num_experts: int) -> Routing:
    """A routing of which only the choices matter."""
    return Routing(
        rows=(rows,),
        normed_TD=experts_TK,
        weights_TK=experts_TK,
        experts_TK=experts_TK,
        num_experts=num_experts,
        tokens=group_by_expert(experts_TK, rows, num_experts),
        outputs_TKD=experts_TK,
    )


def laid_out(driver: Driver) -> tuple[torch.Tensor, list[MicroBatch]]:
    """Hidden states of some prompts, and their micro-batches."""
    seqs = [driver.sequence(prompt, 1) for prompt in oracle.prompts()]
    work = [(seq, len(seq.prompt)) for seq in seqs]
    micro_batches, tokens, _ = driver.lay_out(work, 2, 10**6)
    return driver.decoder.embed(torch.tensor(tokens)), micro_batches
