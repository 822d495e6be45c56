"""A decoder beside the CPU, as far as that can be tested without a GPU.

Torch's meta device computes nothing and holds nothing, so what would have to wait for a GPU fails
there. That no step mixes tensors of two devices is looked at one operation at a time.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moebatch.model.attention.by_torch import Qkv
from moebatch.model.attention.core import AttentionCore
from moebatch.model.attention.span import Span
from moebatch.model.batch import MicroBatch
from moebatch.model.decoder import Decoder
from moebatch.model.dense_weights import DenseWeights
from moebatch.model.routing.router import Routing
from moebatch.model.routing.tokens import group_rows
from moebatch.spec.files.json_file import read_object
from tests.model.driver import LIMITS, Driver

Checkpoint = Callable[..., Path]
CPU, AWAY = torch.device("cpu"), torch.device("meta")
NUM_ROWS = 64
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class OneDevice(TorchDispatchMode):
    """Refuses operations, copies excepted, on tensors of several devices."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
        assert func in _COPIES or len(devices) <= 1, f"{func} on {devices}"
        return func(*args, **kwargs)


@pytest.fixture(params=["mixtral", "qwen2_moe", "olmoe"])
def decoder(request: pytest.FixtureRequest, tiny_checkpoint: Checkpoint) -> Iterator[Decoder]:
    driver = Driver(tiny_checkpoint(request.param, sliding_window=7))

    def away(weights: Any) -> dict[str, torch.Tensor]:
        return {role: weight.to(AWAY) for role, weight in weights.items()}

    weights = DenseWeights(
        globals=away(driver.weights.globals), layers=list(map(away, driver.weights.layers))
    )
    config = read_object(driver.folder / "config.json")
    with OneDevice():
        yield Decoder(driver.shape, config, weights, LIMITS, experts=driver.files.experts)


def test_attention_is_planned_on_the_cpu_and_computed_where_the_decoder_is(
    decoder: Decoder,
) -> None:
    micro = decoder.planner.plan(spans())
    assert devices_of(micro) == {AWAY}
    decoder.attend(0, hidden(decoder, micro), micro, cache(decoder, AWAY))


def test_attention_on_the_cpu_beside_a_decoder_elsewhere(decoder: Decoder) -> None:
    micro = decoder.planner.plan(spans(), attention_device=CPU)
    assert devices_of(micro) == {CPU}
    assert {angle.device for angles in micro.angles for angle in angles if angle is not None} == {
        AWAY
    }
    x_TD = hidden(decoder, micro)
    qkv = decoder.project(0, x_TD, micro)
    below = Qkv(torch.zeros(qkv.q_THC.shape), tuple(torch.zeros(p.shape) for p in qkv.parts))
    out_THC = torch.full_like(below.q_THC, torch.nan)
    core = AttentionCore(decoder.shape, LIMITS, dtype=decoder.dtype, device=CPU)
    core.attend(0, below, micro, cache(decoder, CPU), out_THC)
    assert not out_THC.isnan().any()
    decoder.add_attention(0, x_TD, micro, out_THC.to(AWAY))


def test_of_all_steps_only_routing_waits_for_its_device(decoder: Decoder) -> None:
    shape, num_tokens = decoder.shape, 14
    x_TD = decoder.embed(torch.zeros(num_tokens, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        decoder.route(0, x_TD, slice(2, num_tokens))
    size = num_tokens, shape.experts_per_token
    experts_TK = torch.zeros(size, dtype=torch.int64, device=AWAY)
    routings = [
        Routing(
            rows=(rows,),
            normed_TD=x_TD,
            weights_TK=torch.zeros(size, device=AWAY),
            experts_TK=experts_TK,
            num_experts=shape.num_experts,
            tokens=group_rows(experts_TK, [rows], {3: (rows.stop - rows.start) * size[1]}),
            outputs_TKD=x_TD.new_zeros(*size, shape.hidden_size),
        )
        for rows in (slice(5, num_tokens), slice(0, 3))
    ]
    wide = shape.expert_width, shape.hidden_size
    parts = [torch.empty(matrix, device=AWAY) for matrix in (wide, wide, wide[::-1])]
    for routing in (*routings, Routing.join(routings)):
        decoder.run_experts(0, routing, {3: parts})
        decoder.combine(0, x_TD, routing)
    assert decoder.logits(x_TD[:2]).shape == (2, shape.vocab_size)


def spans() -> list[Span]:
    """A slice of a prompt behind cached tokens, a whole prompt, and two decoding sequences."""
    made: list[Span] = []
    for num_tokens, context in ((9, 4), (3, 0), (1, 9), (1, 0)):
        start = made[-1].start + made[-1].num_tokens if made else 0
        rows_S = torch.randperm(NUM_ROWS)[: context + num_tokens].numpy()
        span = Span(
            start=start, num_tokens=num_tokens, context=context, rows_S=rows_S, rope_length=9
        )
        made.append(span)
    return made


def hidden(decoder: Decoder, micro: MicroBatch) -> torch.Tensor:
    return decoder.embed(torch.zeros(micro.stop, dtype=torch.int64))


def cache(decoder: Decoder, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    size = (NUM_ROWS, decoder.shape.attention.num_kv_heads, decoder.shape.attention.head_dim)
    return torch.zeros(size, device=device), torch.zeros(size, device=device)


def devices_of(micro: MicroBatch) -> set[torch.device]:
    """Where attention is planned."""
    tensors: list[Any] = []
    for layers in micro.by_window.values():
        (plan,) = layers.plans
        tensors.append(layers.new_rows_T)
        tensors += [plan.band_QS, *(prompt.rows for prompt in plan.prompts)]
        for group in plan.decodes:
            tensors += [group.seen.tokens_B, group.seen.rows_BS, group.mask_B11S]
        tensors += (*(plan.singles or ()), *(plan.slices or ()))
    found = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    assert len(found) > 5, "slices and single tokens are all there"
    return {tensor.device for tensor in found}
