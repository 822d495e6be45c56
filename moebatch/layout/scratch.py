"""How much room a decoder takes for what it computes on the way, and in what portions it works.

Shape letters: D hidden, L latent, F expert width, R rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

from moebatch.formats.weight_format import WeightFormat
from moebatch.layout.footprint import ACTIVATIONS_TERM, Buffer
from moebatch.layout.fused import MOST_TOGETHER
from moebatch.spec.machine.hardware import Dtype, LevelName
from moebatch.spec.model.attention import Attention
from moebatch.spec.model.cache_layout import LARGEST_SLICE
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.policy.policy import Policy

PROMPT_ROWS = LARGEST_SLICE
"""Most prompt tokens of a micro-batch."""
_GPU_PROMPT_ROWS = 2048
"""Prompt tokens that a GPU takes through attention and experts at a time."""
GATHER_ROWS = 4096
"""KV rows that decoding sequences gather at a time, unless one sequence has more."""
_LOGITS_BLOCK_BYTES = 32 * 2**20
_MAX_LOGITS_ROWS = 256
SAMPLING_LOGITS = 2**20
"""Logits from which a CPU chooses tokens at a time, in float32: they should stay in its cache."""
_ALIGNMENT = 64
_WEIGHT_BYTES = 4
_INDEX_BYTES = 8
_POSITION_BYTES = 4
_POSITIONS_STEP = 16
MLP_NORMS = frozenset(("shared_norm", "experts_out_norm", "shared_out_norm", "mlp_out_norm"))
"""What a layer may have beside the norms before attention and before experts."""
MAX_GEMM_ROWS = 1536
"""Rows of one matrix product of an expert; more are computed in blocks, of which the last one may
have few rows."""
KERNEL_BLOCK_ROWS = 128
"""Rows that share what the program's own kernel has decoded, with 1 MiB of second-level cache."""
_USUAL_GEMM_ROWS = 1024
_FEW_CODES_ROWS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The largest pieces of work that a decoder is asked to do at once."""

    pass_tokens: int
    """Most tokens of a pass."""
    micro_batch_tokens: int
    """Most tokens of a micro-batch, and most rows of a block of logits."""
    context_tokens: int
    """Most tokens of a sequence, prompt and answer."""
    gather_rows: int = GATHER_ROWS
    """KV rows that decoding sequences gather at a time, padding counted: few enough for a CPU's
    cache."""
    expert_rows: int = MAX_GEMM_ROWS
    """Tokens that an expert, a dense MLP or a router takes at a time."""
    ending_tokens: int = _MAX_LOGITS_ROWS
    """Tokens of a pass from which next ones come, where they are fewer than fit into a block."""

    @property
    def kv_rows(self) -> int:
        """Rows that fit into the room for gathered keys; at least one whole sequence."""
        return max(self.gather_rows, bucket_positions(self.context_tokens))


def gemm_rows(policy: Policy) -> int:
    """Most rows of one matrix product of an expert: half of the tokens of large passes, since more
    hardly choose the same one. A GPU is at its rate with fewer."""
    most, tokens = MAX_GEMM_ROWS, policy.tokens_per_pass
    if policy.ffn_on_gpu:
        most = _USUAL_GEMM_ROWS
    return min(most, max(_USUAL_GEMM_ROWS, tokens // 2), tokens)


def limits_of(policy: Policy, *, max_tokens: int) -> Limits:
    """Portions under `policy` where no sequence is longer than `max_tokens`."""
    return Limits(
        pass_tokens=policy.tokens_per_pass,
        micro_batch_tokens=min(policy.tokens_per_pass, max(policy.micro_batch_size, PROMPT_ROWS)),
        context_tokens=max_tokens,
        expert_rows=gemm_rows(policy),
        ending_tokens=policy.batch_size,
    )


def prompt_rows(policy: Policy, top: LevelName) -> int:
    """Prompt tokens that go through experts together, which are computed at the top."""
    return max(_GPU_PROMPT_ROWS, policy.micro_batch_size) if top == "vram" else PROMPT_ROWS


def bucket_rows(num_rows: int) -> int:
    """The next row count in use: powers of two to 16, then steps of 16, 64, 128 and 256.

    Each new row count of a matrix product costs some 10 ms and stays in oneDNN for good, with about
    1 MB below 256 rows and 5 MB above (measured at 2048 x 7168), so the finer steps are where they
    are cheap. Up to 1,024 rows there are 28 counts.
    """
    if num_rows <= 16:
        return 1 << max(0, num_rows - 1).bit_length()
    step = _bucket_step(num_rows)
    return -(-num_rows // step) * step


def product_rows(num_rows: int, dtype: Dtype, instruction_set: str) -> int:
    """Rows of a matrix product on a CPU that needs so many."""
    is_ours = kernel_multiplies(instruction_set)
    return num_rows if is_ours or dtype == "float32" else bucket_rows(num_rows)


def mean_product_rows(num_rows: float, dtype: Dtype, instruction_set: str) -> float:
    """The same where the number varies from case to case."""
    if num_rows <= 16 or kernel_multiplies(instruction_set) or dtype == "float32":
        return num_rows
    return num_rows + _bucket_step(num_rows) / 2


def kernel_multiplies(instruction_set: str) -> bool:
    """Whether the program's own kernel multiplies rows of 16 bits with weights of the same type
    faster than torch's library does, on a CPU with the instruction set; an empty one stands for no
    kernel.

    oneDNN is as fast by AMX, and with the float16 that comes with it. By AVX512-BF16 it is not,
    whatever the rows (Zen 4, one core, GFLOP/s at 16, 104 and 768 rows: 137, 197 and 215; the
    kernel 192, 213 and 219).
    """
    return instruction_set not in ("", "amx")


def library_multiplies(dtype: Dtype, instruction_set: str) -> bool:
    """Whether torch's library has more than plain loops for products of that type, on a CPU with
    the instruction set. It has none for bfloat16 below AVX-512, for float16 below AVX512-FP16,
    which processors with AMX have (Zen 3, two cores, 16 heads of 128 x 512 in bfloat16: 1.2 to 1.7
    GFLOP/s; the kernel, head by head, 9 to 26 for 16 rows and 65 to 98 for 700).
    """
    if dtype == "float32" or not instruction_set:
        return True
    known = ("amx", "avx512bf16", "avx512") if dtype == "bfloat16" else ("amx",)
    return instruction_set in known


def kernel_multiplies_codes(num_rows: float, dtype: Dtype, instruction_set: str) -> bool:
    """The same of weights of codes, which torch's library would need a decoded copy of. Only with
    AMX that pays (Zen 5, two cores, int4: 525 and 764 GFLOP/s at 128 rows, 774 and 772 at 1,024).
    """
    is_few = num_rows <= _FEW_CODES_ROWS or dtype == "float32"
    return is_few if instruction_set == "amx" else bool(instruction_set)


def needs_matrix(stored: WeightFormat, dtype: Dtype, instruction_set: str) -> bool:
    """Whether some products on a CPU with these kernels need a decoded copy of stored weights; an
    empty instruction set stands for no kernels, as on a GPU."""
    if stored.is_computed_in(dtype):
        return False
    if stored.is_tiled:
        return not instruction_set
    most = kernel_multiplies_codes(MAX_GEMM_ROWS, dtype, instruction_set)
    return not (stored.is_coded and most)


def rows_decoded_at_once(stored: WeightFormat, dtype: Dtype, instruction_set: str) -> int:
    """Rows of a product for which a weight is decoded once: those of a block of the kernel's, or
    all."""
    is_whole = needs_matrix(stored, dtype, instruction_set)
    return MAX_GEMM_ROWS if is_whole else KERNEL_BLOCK_ROWS


def _bucket_step(num_rows: float) -> int:
    """Distance of row counts in use around `num_rows`, from 16 on."""
    return 16 if num_rows <= 256 else 64 if num_rows <= 512 else 128 if num_rows <= 1024 else 256


def bucket_positions(num_positions: int) -> int:
    """The next number of positions to which decoding sequences are padded."""
    return -(-num_positions // _POSITIONS_STEP) * _POSITIONS_STEP


def logits_rows(shape: ModelShape, dtype_bytes: int) -> int:
    """Rows of logits that are computed at a time: bounds memory without slowing the head down."""
    fitting = _LOGITS_BLOCK_BYTES // (shape.vocab_size * dtype_bytes)
    return max(1, min(_MAX_LOGITS_ROWS, fitting))


def block_rows(shape: ModelShape, limits: Limits, dtype_bytes: int) -> int:
    """The same within the limits of a decoder."""
    fewest = min(limits.pass_tokens, limits.ending_tokens)
    return min(fewest, logits_rows(shape, dtype_bytes))


def decoder_buffers(
    shape: ModelShape, limits: Limits, dtype_bytes: int, level: LevelName, *, converts: bool
) -> list[Buffer]:
    """What a `Decoder` allocates up front.

    `converts` says that stored matrices become such of the compute dtype before they are
    multiplied.
    """
    choices = limits.pass_tokens * shape.experts_per_token
    num_logits = bucket_rows(block_rows(shape, limits, dtype_bytes)) * shape.vocab_size
    choosing = chosen_per_token(shape.attention)
    sizes = {
        "hidden states": (limits.pass_tokens * shape.hidden_width, dtype_bytes),
        "logits": (num_logits, dtype_bytes),
        "scratch of a step": (step_elements(shape, limits), dtype_bytes),
        "gathered keys and values": (attention_core_elements(shape, limits), dtype_bytes),
        "chosen tokens": (
            limits.pass_tokens * choosing.num_heads * choosing.num_blocks,
            _POSITION_BYTES,
        ),
        "rows of chosen tokens": (
            limits.micro_batch_tokens * choosing.num_rooms * choosing.num_rows,
            _INDEX_BYTES,
        ),
        "converted matrix": (converted_elements(shape) if converts else 0, dtype_bytes),
        "normed tokens": (limits.pass_tokens * shape.hidden_size, dtype_bytes),
        "latents of tokens": (limits.pass_tokens * (shape.latent_width or 0), dtype_bytes),
        "outputs of experts": (choices * shape.expert_size, dtype_bytes),
        "outputs for the next layer": (
            limits.pass_tokens * shape.hidden_size * shape.adds_experts_late,
            dtype_bytes,
        ),
        "outputs of attention": (
            limits.pass_tokens * shape.hidden_size * shape.adds_attention_late,
            dtype_bytes,
        ),
        "chosen experts": (choices, _WEIGHT_BYTES + _INDEX_BYTES),
        "weights of outputs": (choices * shape.places_unweighed, _WEIGHT_BYTES),
        "experts without room": (choices if shape.router.capacity else 0, _INDEX_BYTES),
    }
    return [Buffer(name, level, ACTIVATIONS_TERM, *size) for name, size in sizes.items()]


class Chosen(NamedTuple):
    """What there is room for of a token that chooses."""

    num_heads: int
    """That choose by themselves."""
    num_blocks: int
    """Chosen by one of them."""
    num_rows: int
    """Cache rows of these; there is room for one head at a time."""
    num_rooms: int
    """For rows: where a token may see a part of a block alone, those that it sees lie apart."""


def chosen_per_token(attention: Attention) -> Chosen:
    """Nothing where none chooses."""
    if (selector := attention.selector) is None:
        return Chosen(1, 0, 0, 1)
    together = selector.together
    num_blocks, num_rooms = -(-selector.most_seen // together), 1 + (together > 1)
    return Chosen(selector.heads_choosing, num_blocks, num_blocks * together, num_rooms)


def num_library_products(
    shape: ModelShape, limits: Limits, dtype: Dtype, instruction_set: str
) -> int:
    """Pairs of a matrix and a row count that a run may have multiplied by torch's library, where
    the program's own kernels run: those of latents, head by head."""
    if not library_multiplies(dtype, instruction_set):
        return 0
    num_counts = len({bucket_rows(rows) for rows in range(1, limits.micro_batch_tokens + 1)})
    return num_counts * sum(each.products_by_head for each in shape.attentions)


def attention_core_elements(shape: ModelShape, limits: Limits) -> int:
    """Elements of the compute dtype that an `AttentionCore` takes: gathered keys and values, and
    queries as they meet sinks."""
    return max(_core_elements(attention, limits) for attention in shape.attentions)


def _core_elements(attention: Attention, limits: Limits) -> int:
    turned = limits.micro_batch_tokens * attention.meeting_width if attention.sink_window else 0
    gathered = (aligned(limits.kv_rows * part.width) for part in attention.cache.parts)
    return sum(gathered) + aligned(turned)


def converted_elements(shape: ModelShape) -> int:
    """Elements of the compute dtype that a stored matrix of an expert becomes at most."""
    return shape.expert_size * shape.expert_width


def step_elements(shape: ModelShape, limits: Limits) -> int:
    """Elements of the compute dtype that the largest step takes from its frame."""
    D, L = shape.hidden_size, shape.latent_width or 0
    rows = bucket_rows(limits.micro_batch_tokens)
    attentions = [_attention_elements(shape, each, rows, limits) for each in shape.attentions]
    recurrence = _recurrence_elements(shape, rows)
    attentions = [(*each, *_norm_gate_elements(shape, rows)) for each in attentions]
    # What is merged, in float32 and as it is, and all streams in float32.
    of_streams = (3 * D + 2 * shape.hidden_width) * (shape.streams is not None)
    attentions = [(*each, rows * of_streams, _ALIGNMENT) for each in attentions]
    rows = bucket_rows(limits.expert_rows)
    width = max(shape.expert_width, shape.shared_expert_width, shape.dense_width)
    mlps = (shape.expert, shape.shared_expert, shape.dense)
    num_biased = MOST_TOGETHER if any(each.bias for each in mlps if each) else 0
    mlp = (
        rows * max(D, L),  # gathered or normed input
        rows * max(D, L) * 2,  # sum of outputs, or a norm's input, in float32
        rows,  # the shared expert's gate
        rows * width,  # gate
        rows * width,  # up
        rows * max(D, L),  # output
        rows * L,  # sum of outputs that are latents
        rows * L * 2,  # the same in float32
        rows * L,  # the same, with more rows
        rows * D * (L > 0),  # what is made of it
        rows * D * bool(shape.router.num_identities),  # what is given back
        rows * D * 2 * shape.adds_experts_late,  # a sum with what is added late, in float32
        rows * max(D, L) * 2 * shape.norms_each_expert,  # what one has made, in float32
        rows * D * 2 * (shape.mlp_residual.mixing is not None),  # what is mixed, in float32
        *(num_biased * [width, width, D]),  # biases of experts that are computed together
    )
    mlp += (rows * of_streams, *(bool(of_streams) * [_ALIGNMENT, rows * D, rows * D * 2]))
    gates = _norm_gate_elements(shape, rows)
    mlp += gates
    more_norms = MLP_NORMS & {*shape.norms, *shape.moe_norms}
    mlp += len(more_norms) * (rows * D, rows * D * 2)  # a sum or normed input, and in float32
    words = 2 if shape.router.has_exact_logits else 1
    router = (
        rows * D,  # normed input
        rows * D * 2,  # the norm's input in float32
        rows * D * 2 * shape.router.has_exact_logits,  # normed input in float32
        rows * shape.num_choices * words,  # logits
        rows * L,  # latents
        rows * L * 2 * shape.norms_latents,  # the same in float32
        rows * D * shape.router.has_own_norm,  # input normed for the gate
        rows * D * 2 * shape.router.has_own_norm,  # the norm's input in float32
        rows * of_streams,  # what is merged of them
        _ALIGNMENT * bool(of_streams),
        *gates,
    )
    return max(sum(map(aligned, step)) for step in (*attentions, recurrence, mlp, router))


def _attention_elements(
    shape: ModelShape, attention: Attention, rows: int, limits: Limits
) -> tuple[int, ...]:
    """What a layer takes that attends, piece by piece."""
    D = shape.hidden_size
    gate = (
        rows * D,  # normed input, once more
        rows * D * 2,  # the norm's input in float32
        rows * attention.gate_width,  # gates of the attention output
    ) * (attention.output_gate is not None)
    return (
        rows * D,  # normed input
        rows * D * 2,  # the norm's input in float32
        *attention.step_rooms(rows, limits.kv_rows),
        rows * D,  # projected output
        rows * D * 2 * ("attention_out_norm" in shape.norms),  # its norm's input in float32
        rows * D * 2 * (shape.attention_residual.mixing is not None),  # what is mixed, in float32
        *gate,
    )


def _norm_gate_elements(shape: ModelShape, rows: int) -> tuple[int, ...]:
    """What a norm takes to weigh what it has made, piece by piece."""
    if shape.norm_gates is None:
        return ()
    D = shape.hidden_size
    return (
        rows * D,  # what it has made, with more rows
        rows * shape.norm_gates.rank,
        rows * D,  # gates
        rows * D * 2,  # the same in float32
    )


def _recurrence_elements(shape: ModelShape, rows: int) -> tuple[int, ...]:
    """What a recurrent layer takes, piece by piece."""
    D, recurrence = shape.hidden_size, shape.recurrence
    if recurrence is None:
        return ()
    floats = (
        rows * D,  # the norm's input
        *recurrence.conv_rooms(rows),
        *recurrence.float_rooms(rows),
    )
    others = (
        rows * D,  # normed input
        rows * recurrence.projected_width,  # projections
        *recurrence.further_rooms(rows),
        rows * recurrence.output_width,  # what comes out, gated
        rows * D,  # projected output
    )
    return (*(2 * elements for elements in floats), *others)


def aligned(num_elements: int) -> int:
    """Elements that one temporary takes, with what is left free before the next."""
    return -(-num_elements // _ALIGNMENT) * _ALIGNMENT
