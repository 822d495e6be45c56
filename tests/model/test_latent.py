"""Latent attention: what is cached, both ways to attend to it, and the kernels' form of it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.checkpoint.model_files import open_model
from moebatch.layout.scratch import Limits, bucket_rows
from moebatch.model.attention.cached_numbers import decode, encode
from moebatch.model.attention.span import Span
from moebatch.model.batch import BatchPlanner, MicroBatch
from moebatch.model.native import loader
from moebatch.model.native.attention_work import Cached, QuerySlices, SingleQueries, work_of
from moebatch.model.native.kernels import Kernels
from moebatch.model.native.scoring import Scoring
from moebatch.model.products import Products
from moebatch.spec.model.cache_layout import CacheDtype, SinkWindow
from moebatch.spec.model.latent_attention import LatentAttention
from moebatch.spec.model.models import load_model
from tests.model import oracle
from tests.model.driver import Driver, Seq
from tests.model.test_native_attention import DTYPES, KERNELS, TOLERANCE
from tests.model.test_oracle import assert_as_transformers
from tests.model.ways import ApartDriver, CgoPipeDriver
from tests.tiny import LATENT

Checkpoint = Callable[..., Path]
LONG = Limits(
    pass_tokens=1213, micro_batch_tokens=1213, context_tokens=703, gather_rows=64, expert_rows=500
)
WIDE = {"num_attention_heads": 64, "num_key_value_heads": 64, "hidden_size": 64}
"""Enough heads for single tokens to be slices."""


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2", "glm-4.7-flash"])
def test_the_cache_holds_a_latent_and_a_rotated_key_of_a_token(name: str) -> None:
    shape = load_model(name).shape
    attention = shape.attention
    assert isinstance(attention, LatentAttention)
    numbers = attention.kv_rank + attention.rope_head_dim
    for cached_in in (None, *get_args(CacheDtype)):
        number_bytes = 2 if cached_in is None else 1
        layout = attention.cached_parts.cached_in(cached_in)
        assert layout.token_bytes(2) <= 1.02 * numbers * number_bytes


@pytest.mark.few(2)
@pytest.mark.parametrize("slice_tokens", [1000, 350, 90])
@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("options", [{}, WIDE], ids=["few heads", "many heads"])
def test_long_prompts(
    slice_tokens: int,
    has_kernels: bool,
    options: dict[str, Any],
    tiny_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys and values are made anew of contexts, several heads at a time."""
    if not has_kernels:
        monkeypatch.setenv(loader.SWITCH, "0")
    monkeypatch.setattr("moebatch.spec.model.latent_attention._EXPANDED_NUMBERS", 3 * 700 * 24)
    folder = tiny_checkpoint(
        "deepseek_v3", max_position_embeddings=1024, num_hidden_layers=2, **options
    )
    prompts = oracle.prompts(lengths=(700, 508, 5))
    assert_as_transformers(
        Driver(folder, limits=LONG), 3, prompts=prompts, slice_tokens=slice_tokens
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize("way", [ApartDriver, CgoPipeDriver])
def test_where_attention_has_no_weights_it_meets_latents_alone(
    family: str, way: type[Driver], tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(family)
    model = oracle.load(folder)
    driver = way(folder)
    planner = driver.decoder.planner
    plan = planner.plan

    def elsewhere(spans: Sequence[Span]) -> MicroBatch:
        return plan(spans, attention_device=torch.device("cpu"))

    monkeypatch.setattr(planner, "plan", elsewhere)
    assert_as_transformers(driver, model=model, slice_tokens=7, micro_batch=3, stagger=2)


def test_slices_are_expanded_where_that_is_less_work() -> None:
    attention = load_model("deepseek-v3").shape.attention
    assert attention.expands(2, 0) and not attention.expands(1, 0)
    assert attention.expands(512, 10_000) and not attention.expands(100, 10_000)
    longest = attention.prompt_flops(512 * 10_000, 10_000)
    assert longest < 512 * 10_000 * attention.decode_flops_per_pair
    few = attention.prompt_flops(100 * 10_000, 10_000)
    assert few == 100 * 10_000 * attention.decode_flops_per_pair


def test_layers_with_a_window_expand_by_sizes_of_their_own(tiny_checkpoint: Checkpoint) -> None:
    files = open_model(tiny_checkpoint("dots3_note_text"), "float32")
    num_new, num_context = 7, 8
    span = Span(0, num_new, num_context, np.arange(num_new + num_context), num_new + num_context)
    planner = BatchPlanner(
        files.shape.attending_within(20),
        files.config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        gather_rows=64,
    )
    by_window = planner.plan([span]).by_window
    expanded = {window: bool(plan.plans[0].expanded) for window, plan in by_window.items()}
    whole, sliding = files.shape.attentions
    expected = {None: whole.expands(7, 8), 9: sliding.expands(7, 8)}
    assert expanded == expected and len({*expected.values()}) == 2


@pytest.mark.few
@pytest.mark.parametrize("cached_in", get_args(CacheDtype))
@pytest.mark.parametrize("sink_window", [None, SinkWindow(4, 12)])
@pytest.mark.parametrize("kv_rank", [20, 21])
def test_with_8_bits_and_sinks_kernels_say_what_torch_says(
    cached_in: CacheDtype,
    sink_window: SinkWindow | None,
    kv_rank: int,
    tiny_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slices of prompts are attended as they are cached, so that both ways see the same numbers."""
    folder = tiny_checkpoint("deepseek_v3", kv_lora_rank=kv_rank)

    def said() -> list[Seq]:
        driver = Driver(folder, cached_in=cached_in, sink_window=sink_window)
        return driver.generate(oracle.prompts(), 6, slice_tokens=7)

    by_kernels = said()
    monkeypatch.setenv(loader.SWITCH, "0")
    for one, other in zip(by_kernels, said(), strict=True):
        torch.testing.assert_close(one.logits[0], other.logits[0], rtol=1e-2, atol=1e-2)
        assert one.answer == other.answer


def test_a_window_as_long_as_a_sequence_changes_nothing(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint("deepseek_v2")
    assert_as_transformers(Driver(folder, sink_window=SinkWindow(4, 500)), 6)


@pytest.mark.parametrize("slice_tokens", [3, 7, 29, 1000])
def test_torch_multiplies_few_counts_of_rows(
    slice_tokens: int, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library keeps something of each, and plans of memory count those of `bucket_rows`. Here
    as on processors for which it has more than loops."""
    monkeypatch.setattr("moebatch.model.products.library_multiplies", lambda *of: True)
    counts = set[int]()
    multiply = Products.by_head

    def counted(products: Products, x_NHI: Tensor, weights_HIO: Tensor, out_NHO: Tensor) -> None:
        counts.update([len(x_NHI)] if len(x_NHI) else [])
        multiply(products, x_NHI, weights_HIO, out_NHO)

    monkeypatch.setattr(Products, "by_head", counted)
    driver = Driver(tiny_checkpoint("deepseek_v2"), dtype=torch.bfloat16)
    prompts = oracle.prompts(lengths=(3, 41, 18, 7, 1, 29, 5, 11, 23))
    driver.generate(prompts, 6, slice_tokens=slice_tokens, stagger=1)
    assert counts == {bucket_rows(count) for count in counts}
    assert len(counts) > 1


def test_layers_that_guess_ahead_are_not_read(tmp_path: Path) -> None:
    """DeepSeek-V3's last one follows those of ``num_hidden_layers``."""
    from safetensors.torch import load_file, save_file

    from tests import tiny

    folder = tiny.write_checkpoint(tmp_path, "deepseek_v3")
    model = oracle.load(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    last, behind = "model.layers.2.", "model.layers.3."
    tensors |= {
        name.replace(last, behind): torch.full_like(tensor, torch.nan)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    tensors[behind + "eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, path, metadata={"format": "pt"})
    tiny.edit_config(folder, num_nextn_predict_layers=1, num_mtp_layers=None)
    assert_as_transformers(Driver(folder), 4, model=model)


@pytest.mark.skipif(not isinstance(KERNELS, Kernels), reason=f"no kernels: {KERNELS}")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cached_in", [None, *get_args(CacheDtype)])
@pytest.mark.parametrize("sizes", [(16, 576, 512), (128, 576, 512), (5, 28, 20), (20, 46, 17)])
def test_kernels_find_values_at_the_beginning_of_their_keys(
    dtype: torch.dtype, cached_in: CacheDtype | None, sizes: tuple[int, int, int]
) -> None:
    num_heads, key_dim, value_dim = sizes
    torch.manual_seed(0)
    contexts = [300, 1, 70]
    num_rows, count = sum(contexts), len(contexts)
    numbers = torch.randn(num_rows, 1, key_dim).to(dtype)
    q = torch.randn(count, num_heads, key_dim).to(dtype)
    cache = numbers if cached_in is None else encode(numbers, cached_in)
    if cached_in is not None:
        numbers = decode(cache, cached_in, numbers.clone())
    values = cache[..., :value_dim]
    starts, rows = torch.tensor([0, 300, 301, 371]), torch.randperm(num_rows)
    outs = [torch.full((count, num_heads, value_dim), torch.nan, dtype=dtype) for _ in range(2)]
    cached, scoring = Cached(cache, values, cached_in), Scoring(0.07)
    assert isinstance(KERNELS, Kernels)
    singles = SingleQueries(torch.arange(count), starts, rows)
    work = work_of(singles, q, cached, outs[0], scoring, num_threads=2)
    KERNELS.attend[cached.number](work, 2)
    slices = QuerySlices(torch.arange(count), torch.ones(count, dtype=torch.int64), starts, rows, 0)
    work = work_of(slices, q, cached, outs[1], scoring, num_threads=2)
    KERNELS.attend_slices(work, 2)
    for i in range(count):
        seen = numbers[rows[starts[i] : starts[i + 1]], 0].double()
        want = F.softmax(0.07 * q[i].double() @ seen.T, -1) @ seen[:, :value_dim]
        for out in outs:
            tolerance = 4 * TOLERANCE[dtype]
            torch.testing.assert_close(out[i], want.to(dtype), rtol=tolerance, atol=tolerance)
