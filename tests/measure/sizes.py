"""Measurements of hundredths of a second."""

from moebatch.measure.sizes import DiskSizes, ModelSizes, Sizes

TINY_DISK = DiskSizes(extent_bytes=2**16, num_slots=3, file_bytes=2**20, read_s=0.01)
TINY = Sizes(
    model=ModelSizes(
        hidden_size=64,
        expert_width=96,
        num_experts=4,
        experts_per_token=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    ),
    gemm_rows=(1, 8, 24),
    buffer_bytes=2**20,
    decode_sequences=(2, 5),
    decode_contexts=(7, 40),
    prompt_slices=(8, 20),
    prompt_contexts=(0, 30),
    elementwise_tokens=24,
    point_s=0.0,
    streamed_point_s=0.0,
    patience_s=0.0,
    disk=TINY_DISK,
)
