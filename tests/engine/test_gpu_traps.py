"""What torch does badly on a GPU is kept from it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.checkpoint.direct import PAGE_BYTES
from moebatch.engine.lanes.streams import Gpu
from moebatch.measure.contention import Patience
from moebatch.measure.gpu import gpu_rates
from moebatch.model.attention import by_torch as attention
from moebatch.model.attention.plan import AttentionPlan, PromptSlice, Sight
from moebatch.model.native.scoring import Scoring
from moebatch.store.memory import Arena, is_out_of_memory
from tests.measure.sizes import TINY

NUMBERS_READ_AT_ONCE = 8
_BAND = 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [5, 16, 23])
@pytest.mark.parametrize("context", [1, 8, 31])
def test_masks_of_prompts_are_aligned(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_tokens: int, context: int
) -> None:
    """A view of the band begins anywhere; torch looks at its strides only."""
    masks: list[Tensor] = []

    real = F.scaled_dot_product_attention

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        masks.append(options["attn_mask"])
        return real(q, k, v, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", recorded)
    band_QS = torch.full((_BAND, _BAND), -torch.inf, dtype=dtype).triu(1)
    q_THC = torch.randn(num_tokens, 4, 16, dtype=dtype)
    k_SGC, v_SGC = torch.randn(2, context + num_tokens, 2, 16, dtype=dtype)
    out_THC = torch.empty_like(q_THC)
    piece = PromptSlice(offset=0, num_tokens=num_tokens, context=context, first_key=0, rows=None)
    plan = AttentionPlan(sight=Sight(), prompts=(piece,), band_QS=band_QS)
    attention.attend_prompt(q_THC, (k_SGC, v_SGC), piece, plan, out_THC, Scoring(0.25))
    (mask_TS,) = masks
    wanted = band_QS[-num_tokens:, -(context + num_tokens) :]
    assert torch.equal(mask_TS, wanted)
    assert mask_TS.data_ptr() % (NUMBERS_READ_AT_ONCE * dtype.itemsize) == 0
    assert mask_TS.stride(0) % NUMBERS_READ_AT_ONCE == 0


HAS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, HAS_GPU])])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_prompts_see_what_they_should_whatever_their_length(
    dtype: torch.dtype, device: str
) -> None:
    """Heads that share keys are views of stride 0, which kernels of GPUs have got wrong at some
    numbers of keys (pytorch issue 191937)."""
    Gpu()
    generator, tolerance = torch.Generator().manual_seed(5), TOLERANCES[dtype]
    band_QS = torch.full((192, 192), -torch.inf).triu(1).to(device, dtype)
    for num_keys in range(1, 131) if device == "cuda" else (1, 2, 33, 65, 130):
        num_tokens = min(num_keys, 7)
        context = num_keys - num_tokens
        q_THC = torch.randn(num_tokens, 4, 16, generator=generator)
        k_SGC, v_SGC = torch.randn(2, num_keys, 2, 16, generator=generator)
        weights_HTS = torch.einsum("thc,shc->hts", q_THC, k_SGC.repeat_interleave(2, 1)) / 4
        hidden_TS = torch.ones(num_tokens, num_keys, dtype=torch.bool).triu(context + 1)
        weights_HTS = weights_HTS.masked_fill(hidden_TS, -torch.inf).softmax(-1)
        wanted_THC = torch.einsum("hts,shc->thc", weights_HTS, v_SGC.repeat_interleave(2, 1))
        piece = PromptSlice(
            offset=0, num_tokens=num_tokens, context=context, first_key=0, rows=slice(0)
        )
        plan = AttentionPlan(sight=Sight(), prompts=(piece,), band_QS=band_QS)
        q, k, v = (x.to(device, dtype) for x in (q_THC, k_SGC, v_SGC))
        out_THC = torch.empty_like(q)
        attention.attend_prompt(q, (k, v), piece, plan, out_THC, Scoring(0.25))
        error = (out_THC.cpu().float() - wanted_THC).abs().max()
        assert error < tolerance, f"{num_keys} keys"


@pytest.mark.parametrize("when", ["run", "profile"])
def test_attention_does_not_plan_anew_for_every_shape(
    monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    if when == "run":
        Gpu()
    else:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.current_device", lambda: _measured())
        with pytest.raises(_Measured):
            gpu_rates(TINY, Patience(1, 0.0), lambda line: None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


class _Measured(Exception):
    """That it would be."""


def _measured() -> None:
    raise _Measured


class _Runtime:
    """Of a system that pins nothing, or everything."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.pinned: set[int] = set()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.status:
            self.pinned.add(address)
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        self.pinned.remove(address)


@pytest.mark.parametrize("status", [0, 2, 801], ids=["pins", "limited", "not supported"])
def test_memory_that_the_system_does_not_pin_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """And the refusal is not left to the next kernel that is launched."""
    told: list[object] = []

    def next_kernel(*_: object, device: str) -> None:
        told.append(device)
        raise RuntimeError("CUDA error: operation not supported")

    runtime = _Runtime(status)
    monkeypatch.setattr("moebatch.store.memory._cuda_runtime", lambda: runtime)
    monkeypatch.setattr("torch.ones", next_kernel)
    arena = Arena(PAGE_BYTES, pinned=True)
    arena.bytes.fill_(7)
    assert arena.is_pinned == (not status)
    assert told == ["cuda"] * bool(status)
    arena.unpin()
    assert not runtime.pinned


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "out of memory (2)",
    ],
)
def test_memory_that_a_gpu_refuses_is_known_by_its_text(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
