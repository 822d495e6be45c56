"""What torch does badly on a GPU is kept from it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moebatch.engine.streams import Gpu
from moebatch.model import attention
from moebatch.model.attention import AttentionPlan, PromptSlice
from moebatch.store.memory import is_out_of_memory

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

    def recorded(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor, is_causal: bool) -> Tensor:
        masks.append(attn_mask)
        return real(q, k, v, attn_mask=attn_mask, is_causal=is_causal)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", recorded)
    band_QS = torch.full((_BAND, _BAND), -torch.inf, dtype=dtype).triu(1)
    q_THC = torch.randn(num_tokens, 4, 16, dtype=dtype)
    k_SGC, v_SGC = torch.randn(2, context + num_tokens, 2, 16, dtype=dtype)
    out_THC = torch.empty_like(q_THC)
    piece = PromptSlice(offset=0, num_tokens=num_tokens, context=context, first_key=0, rows=None)
    plan = AttentionPlan(window=None, decodes=(), prompts=(piece,), band_QS=band_QS)
    attention._attend_prompt(q_THC, k_SGC, v_SGC, piece, plan, out_THC)
    (mask_TS,) = masks
    wanted = band_QS[-num_tokens:, -(context + num_tokens) :]
    assert torch.equal(mask_TS, wanted)
    assert mask_TS.data_ptr() % (NUMBERS_READ_AT_ONCE * dtype.itemsize) == 0
    assert mask_TS.stride(0) % NUMBERS_READ_AT_ONCE == 0


def test_attention_does_not_plan_anew_for_every_shape() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    Gpu()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


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
