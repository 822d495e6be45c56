"""Layers whose sequences keep a state of fixed size in place of keys and values.

Shape letters: D hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple

from moebatch.spec.model.attention import Sizes, rows_by_part
from moebatch.spec.model.cache_layout import CacheLayout, CachePart, StateDtype

CHUNK_TOKENS = 64
"""Tokens of a prompt whose changes of a matrix are worked out together."""
_COPIED_STATES = 8
_TORCH_BYTES: Mapping[StateDtype, int] = {"float32": 24, "float16": 68}
"""Of each number of a matrix, read and written: they fade, are looked up, corrected and read again
in float32; and before are widened, and behind it get their noise and are rounded."""
_AMONG = 4
"""Decays of channels, and products of keys that they are multiplied with."""
_FADING_BYTES = 20
"""Of each number of a matrix, written, read and written, and read: what is left of each, where each
fades by itself."""
_SCANNED_FLOPS = 26
"""Of each number of a matrix by a token: an exponential is some 20."""
_DOUBLING_BYTES = 44
"""Of each number of a token's matrix, read and written, as a parallel scan sees twice as far."""
_SLOPE_STEP = 1e-5
"""What keeps the slope of a last layer above nothing, and that of an only one defined."""
MOST_SEEN = 16
"""Most tokens that a convolution may see: compiled kernels hold them in registers."""


class StepLaunches(NamedTuple):
    """Kernels that torch launches on a GPU for a layer of one kind, its convolution left out."""

    once: int
    """Beside its norms, its two projections and the sum: states that begin are filled, taps laid
    out, and what the rule takes is made."""
    step: int = 0
    """For sequences that decode."""
    chunk: int = 0
    """For some tokens of a prompt."""
    norms: int = 0
    """Norms of what comes out that are counted as such, not in `once`."""
    gated_norms: int = 0
    """The same of norms that are gated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recurrence(ABC):
    """What all of them have: a projection of the hidden states, in most kinds a short causal
    convolution over each of its channels, and a projection back. The state is what the convolution
    sees of the last tokens, and what a kind of recurrence keeps beside it."""

    conv_width: int = 0
    """Tokens that a convolution sees, the newest included; 0 where there is none."""
    conv_bias: bool = False
    """Convolutions add one."""
    bias: bool = False
    """Both projections do."""
    state_dtype: StateDtype | None = None
    """What numbers of matrices are kept as; None where there are none."""
    launches: ClassVar[StepLaunches]
    """What plans count on a GPU; `tests/engine/test_launches.py` counts what is launched."""
    exact_roles: ClassVar[frozenset[str]] = frozenset()
    """Tensors that are held in float32."""
    chunk_key: ClassVar[str | None] = None
    """What config.json calls the tokens that transformers takes through it together, where it says
    how many."""
    fills_chunks: ClassVar[bool] = True
    """transformers fills sequences up to whole chunks."""
    chunk_tokens: ClassVar[int] = CHUNK_TOKENS
    """Tokens of a prompt that change a matrix together, where torch has them do so."""
    is_scanned: ClassVar[bool] = False
    """Kernels on a GPU take tokens of prompts one by one as well, since no products of matrices
    would take a chunk of them."""

    @property
    @abstractmethod
    def conv_channels(self) -> int:
        """Width of what is convolved."""

    @property
    @abstractmethod
    def projected_width(self) -> int:
        """Width of all that is projected of a token."""

    def further_rooms(self, rows: int) -> tuple[int, ...]:
        """Numbers in the type of the computation that a layer takes for what is projected of that
        once more, piece by piece."""
        return ()

    @property
    @abstractmethod
    def output_width(self) -> int:
        """Width of what is projected back."""

    @property
    def state(self) -> CacheLayout:
        """What is kept of a sequence: the last part is what the next tokens' convolutions see."""
        if not self.conv_width:
            return CacheLayout(self.own_state)
        seen = CachePart("last inputs", self.conv_width - 1, self.conv_channels)
        return CacheLayout((*self.own_state, seen))

    @property
    def own_state(self) -> tuple[CachePart, ...]:
        """What is kept before that."""
        return ()

    def tensors(self, hidden_size: int) -> Sizes:
        """Sizes of the weights of a layer, by role."""
        D = hidden_size
        sizes = self.input_tensors(D) | self.conv_tensors
        sizes["recurrent_out"] = (D, self.output_width)
        if self.conv_bias:
            sizes["recurrent_conv_bias"] = (self.conv_channels,)
        if self.bias:
            sizes |= {"recurrent_in_bias": (self.projected_width,), "recurrent_out_bias": (D,)}
        return sizes | self.own_tensors

    def input_tensors(self, hidden_size: int) -> Sizes:
        """Those of the first projection, as they are stored."""
        return {"recurrent_in": (self.projected_width, hidden_size)}

    @property
    def conv_tensors(self) -> Sizes:
        """Those of the convolution but for its bias, as they are stored."""
        if not self.conv_width:
            return {}
        return {"recurrent_conv": (self.conv_channels, 1, self.conv_width)}

    @property
    def own_tensors(self) -> Sizes:
        """Those that no other kind has."""
        return {}

    def row_order(self, role: str) -> list[int] | None:
        """In which order the rows of a stored weight are computed with; None where they lie so."""
        return None

    @property
    def states_at_once(self) -> int:
        """Most sequences whose next token torch takes at once."""
        return CHUNK_TOKENS

    def conv_rooms(self, rows: int) -> tuple[int, ...]:
        """Numbers in float32 that a layer takes for its convolution, piece by piece."""
        if not self.conv_width:
            return ()
        channels = self.conv_channels
        return (
            self.conv_width * channels,  # weights
            channels * self.conv_bias,  # bias
            rows * channels,  # what it makes
        )

    def float_rooms(self, rows: int) -> tuple[int, ...]:
        """The same behind it."""
        return ()

    def trained_numbers(self, chunk_tokens: int) -> int:
        """Numbers in float32 of a token in one layer that gradients of transformers' modules need
        beside what is convolved, where so many tokens are taken together: counted by what autograd
        keeps."""
        return 0

    def step_bytes(self, compute_bytes: int, *, by_torch: bool) -> int:
        """Bytes that go through memory as one sequence takes a step in one layer: kernels read its
        state and write it."""
        return 2 * self.state.token_bytes(compute_bytes)

    @property
    def conv_flops(self) -> int:
        """FLOP of a token in one layer by its convolutions."""
        return 2 * self.conv_width * self.conv_channels

    @property
    def decode_flops(self) -> int:
        """FLOP of a token in one layer beside its projections, token by token."""
        return self.conv_flops

    @property
    def prompt_flops(self) -> int:
        """The same of a token among others of its prompt."""
        return self.decode_flops

    @property
    def scanned_bytes(self) -> int:
        """Bytes that go through memory for each token of a prompt in one layer, where torch takes
        chunks of it: none to speak of where products of matrices do so."""
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConvolution(Recurrence):
    """A convolution and no more (LFM2, Liquid AI 2025): of a token's three projections the first
    multiplies the last before it is convolved, and the second what comes out."""

    launches: ClassVar[StepLaunches] = StepLaunches(once=3)

    width: int
    """Of hidden states."""

    @property
    def conv_channels(self) -> int:
        return self.width

    @property
    def projected_width(self) -> int:
        """Both factors and what is convolved."""
        return 3 * self.width

    @property
    def output_width(self) -> int:
        return self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixRecurrence(Recurrence):
    """Each value head has a matrix that maps keys to values. A token makes it fade and adds to what
    its key gives; the query reads what it puts out. Queries, keys and values have been convolved
    where there is a convolution, and what is put out is gated."""

    corrects: ClassVar[bool]
    """A token looks up what its key gives, and adds what that lacks of its value; else it adds its
    value."""
    head_roles: ClassVar[Sequence[str]] = ("recurrent_decay", "recurrent_step")
    """Weights of which each value head has one number: what fading and rates are made of."""
    fading_bytes: ClassVar[int] = 0
    """Of each number of a matrix that torch moves in a step for what it fades by alone."""

    num_key_heads: int
    """Heads of queries and keys; each serves as many value heads as the next."""
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    state_dtype: StateDtype = "float32"
    """What numbers of the matrices are kept as; all are computed with in float32."""

    @property
    def key_width(self) -> int:
        """Width of the keys of a token, all heads side by side."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """The same of its values, of the gates of its output, and of what it puts out."""
        return self.num_value_heads * self.value_head_dim

    @property
    def fading_dim(self) -> int:
        """Numbers by which a token has a matrix fade: one, or one for each channel of keys."""
        return 1

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_width + self.value_width

    @property
    def output_width(self) -> int:
        return self.value_width

    @property
    def own_state(self) -> tuple[CachePart, ...]:
        """The matrix of each value head, [keys, values]."""
        matrix = self.key_head_dim * self.value_head_dim
        return (CachePart("matrices", self.num_value_heads, matrix, self.state_dtype),)

    @property
    def own_tensors(self) -> Sizes:
        """Those of heads, and the norm of what comes out."""
        heads: Sizes = dict.fromkeys(self.head_roles, (self.num_value_heads,))
        return heads | {"recurrent_norm": (self.normed_width,)}

    @property
    def normed_width(self) -> int:
        """Width of the weights of that norm: each head is normed by itself, all with the same."""
        return self.value_head_dim

    def float_rooms(self, rows: int) -> tuple[int, ...]:
        """Of tokens queries, keys, values and what comes out, and what a chunk takes."""
        chunk, heads = min(rows, self.chunk_tokens), self.num_value_heads
        keys, values = heads * chunk * self.key_head_dim, heads * chunk * self.value_head_dim
        return (
            rows * self.key_width,  # queries
            rows * self.key_width,  # keys
            rows * self.value_width,  # values
            rows * self.value_width,  # what comes out of matrices
            rows * heads * self.fading_dim,  # logarithms of what is left of them
            rows * heads * self.fading_dim,  # what is left of them
            keys,  # of a chunk: queries
            keys,  # keys
            keys + values,  # changes
            heads * chunk * chunk * self.fading_dim,  # what is left of each when the next come
            heads * chunk * chunk,  # each with each
            *self.copied_rooms(rows),
        )

    def copied_rooms(self, rows: int) -> tuple[int, int]:
        """The same of states that are kept otherwise: in float32, and what rounds them."""
        copied = min(rows, self.states_at_once) * (self.state_dtype != "float32")
        return copied * self.matrix_elements, copied * self.matrix_elements

    @property
    def states_at_once(self) -> int:
        """States that are kept otherwise than they are computed with are copied."""
        return CHUNK_TOKENS if self.state_dtype == "float32" else _COPIED_STATES

    def step_bytes(self, compute_bytes: int, *, by_torch: bool) -> int:
        """Torch goes through the matrices once for each operator."""
        if by_torch:
            return (_TORCH_BYTES[self.state_dtype] + self.fading_bytes) * self.matrix_elements
        return 2 * self.state.token_bytes(compute_bytes)

    @property
    def decode_flops(self) -> int:
        """Fading, adding and reading; and looking up and correcting."""
        return self.conv_flops + (7 if self.corrects else 5) * self.matrix_elements

    @property
    def prompt_flops(self) -> int:
        """In chunks (Yang et al. 2024, section 3.3; Dao & Gu 2024, section 6): queries, and where
        tokens correct keys, meet keys; a triangular system is solved for values and keys then; and
        keys, queries and updates meet the matrix. Kernels take about a tenth longer where
        channels fade apart."""
        chunk, keys, values = CHUNK_TOKENS, self.key_head_dim, self.value_head_dim
        among, with_matrix = 2 * chunk * (keys + values), 4 * keys * values
        if self.corrects:
            among += 2 * chunk * keys + chunk * (keys + values)
            with_matrix += 2 * keys * values
        return self.conv_flops + self.num_value_heads * (among + with_matrix)

    def trained_numbers(self, chunk_tokens: int) -> int:
        """4 sizes of Gated DeltaNet, 3 of Kimi Delta Attention, which has what is left of each
        token when each other one comes for each channel, and 5 of Mamba-2."""
        keys, values = self.key_head_dim, self.value_head_dim
        of_head = 3 * chunk_tokens
        of_head += 12 * keys + 9 * values if self.corrects else 6 * keys + 8 * values
        if self.fading_dim > 1:
            of_head += _AMONG * chunk_tokens * keys
        return self.num_value_heads * of_head

    @property
    def matrix_elements(self) -> int:
        """Numbers of a sequence in one layer, all heads."""
        return prod((self.num_value_heads, self.key_head_dim, self.value_head_dim))


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta(MatrixRecurrence):
    """Gated DeltaNet (Yang et al. 2024, Gated Delta Networks, equation 10): a token looks up what
    its key gives, and corrects that towards its value. Keys and queries are unit vectors."""

    launches: ClassVar[StepLaunches] = StepLaunches(once=23, step=15, chunk=31, gated_norms=1)
    corrects: ClassVar[bool] = True

    is_grouped: bool = False
    """Projections are stored as two matrices in which the rows of each key head lie together with
    those of its value heads, not as four."""

    @property
    def projected_width(self) -> int:
        """Queries, keys, values, gates of the output, and of each value head a rate of learning and
        one of fading."""
        return self.conv_channels + self.value_width + 2 * self.num_value_heads

    def input_tensors(self, hidden_size: int) -> Sizes:
        D, heads = hidden_size, self.num_value_heads
        if self.is_grouped:
            return {
                "delta_qkvz": (self.conv_channels + self.value_width, D),
                "delta_ba": (2 * heads, D),
            }
        return {
            "delta_qkv": (self.conv_channels, D),
            "delta_z": (self.value_width, D),
            "delta_b": (heads, D),
            "delta_a": (heads, D),
        }

    def row_order(self, role: str) -> list[int] | None:
        """Queries, keys, values and gates, each in the order of heads."""
        shared = self.num_value_heads // self.num_key_heads
        of_values = shared * self.value_head_dim
        parts = {
            "delta_qkvz": (self.key_head_dim, self.key_head_dim, of_values, of_values),
            "delta_ba": (shared, shared),
        }.get(role)
        return None if parts is None else rows_by_part(self.num_key_heads, parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelDelta(MatrixRecurrence):
    """Kimi Delta Attention (Kimi Team 2025, Kimi Linear): Gated DeltaNet in which each channel of
    a key fades by itself. Fading and gates of the output may be projected through a few numbers."""

    launches: ClassVar[StepLaunches] = StepLaunches(once=25, step=15, chunk=30, norms=1)
    corrects: ClassVar[bool] = True
    exact_roles: ClassVar[frozenset[str]] = frozenset(("recurrent_step", "recurrent_norm"))
    chunk_tokens: ClassVar[int] = 16
    """Few, since what is left of each token when each other one comes is a number for each
    channel."""

    rank: int | None
    """Numbers through which fading and gates are projected; None where they are at once."""
    least_fading: float | None = None
    """What logarithms of what is left of a channel are above, below zero: they are a sigmoid of
    what is projected, times this (Ling 3.0). None where softplus makes them, without an end."""

    @property
    def fading_dim(self) -> int:
        return self.key_head_dim

    @property
    def projected_width(self) -> int:
        """Queries, keys and values, what gates and fading are made of, and of each head a rate of
        learning."""
        return self.conv_channels + sum(self.made_of_widths) + self.num_value_heads

    @property
    def made_of_widths(self) -> tuple[int, int]:
        """Width of what gates of the output are made of, and of what fading is."""
        if self.rank is None:
            return self.value_width, self.fading_width
        return self.rank, self.rank

    @property
    def fading_width(self) -> int:
        """Width of the fading of a token, all heads side by side."""
        return self.num_value_heads * self.key_head_dim

    def further_rooms(self, rows: int) -> tuple[int, ...]:
        """Gates of the output, and fading."""
        return () if self.rank is None else (rows * self.value_width, rows * self.fading_width)

    def input_tensors(self, hidden_size: int) -> Sizes:
        """All apart, in the order in which they are computed together: what has been read so is
        joined where it lies."""
        of_gates, of_fading = self.made_of_widths
        widths = self._convolved_widths | {"z": of_gates, "b": self.num_value_heads, "a": of_fading}
        return {f"delta_{role}": (width, hidden_size) for role, width in widths.items()}

    @property
    def conv_tensors(self) -> Sizes:
        widths, seen = self._convolved_widths, self.conv_width
        return {f"recurrent_conv_{role}": (width, 1, seen) for role, width in widths.items()}

    @property
    def _convolved_widths(self) -> dict[str, int]:
        return {"q": self.key_width, "k": self.key_width, "v": self.value_width}

    @property
    def own_tensors(self) -> Sizes:
        """What widens gates and fading; how fast each head fades; and the norm of what comes
        out."""
        wide: Sizes = {}
        if self.rank is not None:
            wide["delta_z_wide"] = (self.value_width, self.rank)
            wide["delta_a_wide"] = (self.fading_width, self.rank)
        return wide | {
            "recurrent_decay": (self.num_value_heads,),
            "recurrent_step": (self.fading_width,),
            "recurrent_norm": (self.normed_width,),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpace(MatrixRecurrence):
    """Mamba-2 (Dao & Gu 2024, Transformers are SSMs, section 7): a token adds its value, times the
    length of its time step, where its key points; a part of the value goes past the matrix. Keys
    are B of the paper, queries are C, and key heads its groups."""

    launches: ClassVar[StepLaunches] = StepLaunches(once=24, step=12, chunk=24)
    chunk_key: ClassVar[str | None] = "mamba_chunk_size"
    corrects: ClassVar[bool] = False
    head_roles: ClassVar[Sequence[str]] = (*MatrixRecurrence.head_roles, "recurrent_skip")

    @property
    def projected_width(self) -> int:
        """Gates of the output, values, keys, queries, and of each value head the length of the time
        step."""
        return self.value_width + self.conv_channels + self.num_value_heads

    @property
    def normed_width(self) -> int:
        """Value heads of a key head are normed together, with weights of their own."""
        return self.value_width


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveScan(MatrixRecurrence):
    """Mamba-1 (Gu & Dao 2023, Mamba, algorithm 2), with norms of what it selects by (AI21 2024,
    Jamba): one matrix with a column for each channel of values. A token adds its value, times the
    length of the channel's time step, where its key points; each number of the matrix fades by
    that length and a rate of its own. Keys are B of the paper, queries C: they and the lengths are
    projected of what has been convolved, the latter through a few numbers."""

    launches: ClassVar[StepLaunches] = StepLaunches(once=16, step=11, chunk=23, norms=3)
    corrects: ClassVar[bool] = False
    is_scanned: ClassVar[bool] = True
    chunk_tokens: ClassVar[int] = 16
    """Few, since what becomes of a matrix behind each of them is held."""
    exact_roles: ClassVar[frozenset[str]] = frozenset(("recurrent_decay",))
    fading_bytes: ClassVar[int] = _FADING_BYTES

    num_key_heads: int = 1
    num_value_heads: int = 1
    rank: int
    """Numbers through which lengths of time steps are projected."""

    @property
    def conv_channels(self) -> int:
        return self.value_width

    @property
    def projected_width(self) -> int:
        """Values, and gates of the output."""
        return 2 * self.value_width

    @property
    def selecting_width(self) -> int:
        """Width of what is projected of values: what lengths are made of, keys and queries."""
        return self.rank + 2 * self.key_head_dim

    @property
    def own_tensors(self) -> Sizes:
        channels, keys = self.value_width, self.key_head_dim
        return {
            "scan_select": (self.selecting_width, channels),
            "scan_step_norm": (self.rank,),
            "scan_key_norm": (keys,),
            "scan_query_norm": (keys,),
            "scan_step": (channels, self.rank),
            "recurrent_step": (channels,),
            "recurrent_decay": (channels, keys),
            "recurrent_skip": (channels,),
        }

    def further_rooms(self, rows: int) -> tuple[int, ...]:
        """What has been convolved, what is selected by, that of it which lengths are made of, and
        these."""
        widths = (self.value_width, self.selecting_width, self.rank, self.value_width)
        return tuple(rows * width for width in widths)

    def float_rooms(self, rows: int) -> tuple[int, ...]:
        """Of tokens keys, queries, lengths and what comes out; how fast numbers fade; and what a
        chunk takes, or states whose next token torch takes."""
        chunk, keys, channels = min(rows, self.chunk_tokens), self.key_head_dim, self.value_width
        return (
            rows * max(self.rank, keys),  # what norms take
            rows * keys,  # keys
            rows * keys,  # queries
            rows * channels,  # lengths
            rows * channels,  # what comes out of matrices
            keys * channels,  # how fast they fade
            *self.copied_rooms(rows),
            chunk * self.matrix_elements,  # what is left of them
            chunk * self.matrix_elements,  # what they become
            chunk * self.matrix_elements,  # on the way there
        )

    @property
    def states_at_once(self) -> int:
        """Of each as many numbers are worked out by which it fades."""
        return _COPIED_STATES

    @property
    def decode_flops(self) -> int:
        """Exponentials, fading, adding and reading."""
        return self.conv_flops + _SCANNED_FLOPS * self.matrix_elements

    @property
    def prompt_flops(self) -> int:
        """Token by token, whatever takes them."""
        return self.decode_flops

    @property
    def scanned_bytes(self) -> int:
        """A parallel scan: numbers are gone through for each doubling."""
        doublings = (self.chunk_tokens - 1).bit_length()
        return (_DOUBLING_BYTES * doublings + self.fading_bytes + 16) * self.matrix_elements

    def trained_numbers(self, chunk_tokens: int) -> int:
        """What is left of each number, what is added to it, and what it becomes; 2 sizes."""
        return 3 * self.matrix_elements + 4 * self.value_width


@dataclass(frozen=True, kw_only=True, slots=True)
class LightningAttention(MatrixRecurrence):
    """Linear attention whose matrices fade alike with every token (Qin et al. 2024, Lightning
    Attention-2; MiniMax 2025, MiniMax-01): those of later heads and of later layers more slowly.
    Queries, keys and values have been activated."""

    launches: ClassVar[StepLaunches] = StepLaunches(once=9, step=12, chunk=24, norms=1)
    chunk_key: ClassVar[str | None] = "block_size"
    fills_chunks: ClassVar[bool] = False
    corrects: ClassVar[bool] = False
    head_roles: ClassVar[Sequence[str]] = ()

    num_layers: int
    """Of the model."""

    def fading(self, layer: int) -> tuple[float, ...]:
        """Natural logarithms of what a token leaves of the matrix of each head of a layer."""
        slope = 1 - layer / (self.num_layers - 1 + _SLOPE_STEP) + _SLOPE_STEP
        heads = self.num_value_heads
        return tuple(-slope * 2 ** (-8 * (head + 1) / heads) for head in range(heads))

    def trained_numbers(self, chunk_tokens: int) -> int:
        """3 sizes."""
        of_head = chunk_tokens + 4 * self.key_head_dim + 3 * self.value_head_dim
        return self.num_value_heads * of_head

    @property
    def projected_width(self) -> int:
        """Queries, keys, values, and gates of the output."""
        return self.conv_channels + self.value_width

    @property
    def normed_width(self) -> int:
        """All heads are normed together."""
        return self.value_width

    def input_tensors(self, hidden_size: int) -> Sizes:
        D = hidden_size
        return {"lightning_qkv": (self.conv_channels, D), "lightning_gate": (self.value_width, D)}

    def row_order(self, role: str) -> list[int] | None:
        """Rows of each head lie together."""
        if role != "lightning_qkv":
            return None
        of_head = (self.key_head_dim, self.key_head_dim, self.value_head_dim)
        return rows_by_part(self.num_value_heads, of_head)
