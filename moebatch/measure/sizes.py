"""How large the measured work is, and how long it may take."""

from dataclasses import dataclass, field, replace
from typing import get_args

from moebatch.formats.ggml import decoded_types
from moebatch.formats.registry import measured_formats
from moebatch.formats.weight_format import WeightFormat
from moebatch.layout.scratch import MAX_GEMM_ROWS, PROMPT_ROWS
from moebatch.spec.machine.hardware import Dtype
from moebatch.spec.model.cache_layout import CacheDtype


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """One layer of a model: large enough that no cache holds an expert."""

    hidden_size: int = 2048
    expert_width: int = 7168
    num_experts: int = 8
    experts_per_token: int = 2
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 64


TINY_MODEL = ModelSizes(hidden_size=64, expert_width=64, num_heads=4, num_kv_heads=2, head_dim=16)
"""So small that its products take no time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskSizes:
    """Reads and writes of the disk."""

    extent_bytes: int = 64 * 2**20
    """What is read into one slot, in the pieces of the store."""
    num_slots: int = 6
    file_bytes: int = 2**30
    """File that is written where none is given to read."""
    read_s: float = 4.0
    num_readers: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Everything that bounds a measurement. The defaults take about three minutes on two cores."""

    model: ModelSizes = ModelSizes()
    dtypes: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")
    """Data types of the matrix products."""
    attention_dtype: Dtype = "bfloat16"
    cache_dtypes: tuple[CacheDtype, ...] = get_args(CacheDtype)
    """8 bits in which keys and values are attended to as well."""
    formats: tuple[WeightFormat, ...] = field(
        default_factory=lambda: (*measured_formats(), *decoded_types())
    )
    """Those whose decoding is measured."""
    gemm_rows: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 512, 1024, MAX_GEMM_ROWS)
    buffer_bytes: int = 768 * 2**20
    """Memory through which reading and the weights of products walk, unless less is free."""
    decode_sequences: tuple[int, ...] = (64, 256)
    decode_contexts: tuple[int, ...] = (16, 64, 256, 1024)
    prompt_slices: tuple[int, ...] = (128, 256, PROMPT_ROWS)
    prompt_contexts: tuple[int, ...] = (0, 1000)
    elementwise_tokens: int = 1024
    gather_rows: int = 4096
    """Cached rows that decoding sequences gather at a time."""
    point_s: float = 0.6
    """Repeats of one point begin until so much time has gone by."""
    streamed_point_s: float = 1.0
    """The same for experts fresh from disk, waiting for them included."""
    longest_s: float = 1.5
    """Points of a curve that would take longer each are left out: the rate is flat by then."""
    patience_s: float = 30.0
    """Time for measuring again what other programs disturbed."""
    disk: DiskSizes = DiskSizes()
    is_written: bool = True
    """Whether a file is written, to measure writing or to have something to read."""


def quick_sizes(
    dtypes: tuple[Dtype, ...],
    formats: tuple[WeightFormat, ...] = (),
    cache_dtype: CacheDtype | None = None,
) -> Sizes:
    """A few seconds in all: few points, and no file is written. Attention is measured in the first
    of the data types, and with a cache of 8 bits where one is given."""
    return Sizes(
        dtypes=dtypes,
        formats=formats,
        attention_dtype=dtypes[0],
        cache_dtypes=() if cache_dtype is None else (cache_dtype,),
        gemm_rows=(4, 64, 256, MAX_GEMM_ROWS),
        buffer_bytes=384 * 2**20,
        decode_sequences=(64,),
        decode_contexts=(64, 512),
        prompt_slices=(256,),
        prompt_contexts=(0,),
        elementwise_tokens=256,
        point_s=0.05,
        streamed_point_s=0.3,
        longest_s=0.5,
        patience_s=0.0,
        disk=DiskSizes(read_s=1.0),
        is_written=False,
    )


def gpu_sizes(sizes: Sizes) -> Sizes:
    """The same on a GPU, where many more rows are needed before a rate is flat."""
    most = sizes.gemm_rows[-1]
    return replace(
        sizes,
        gemm_rows=(*sizes.gemm_rows, 4 * most),
        dtypes=tuple(dtype for dtype in sizes.dtypes if dtype != "float32") or sizes.dtypes,
        gather_rows=16 * sizes.gather_rows,
    )
