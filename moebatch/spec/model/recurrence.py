"""Layers whose sequences keep a state of fixed size in place of keys and values.

Shape letters: D hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from moebatch.spec.model.attention import Sizes, rows_by_part
from moebatch.spec.model.cache_layout import CacheLayout, CachePart, StateDtype

CHUNK_TOKENS = 64
"""Tokens of a prompt whose changes of a matrix are worked out together."""
_COPIED_STATES = 8
_TORCH_BYTES: Mapping[StateDtype, int] = {"float32": 24, "float16": 68}
"""Of each number of a matrix, read and written: they fade, are looked up, corrected and read again
in float32; and before are widened, and behind it get their noise and are rounded."""
MOST_SEEN = 16
"""Most tokens that a convolution may see: compiled kernels hold them in registers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta:
    """Gated DeltaNet (Yang et al. 2024, Gated Delta Networks, equation 10). Each value head has a
    matrix that maps keys to values. A token makes it fade, looks up what its key gives, and
    corrects that towards its value; the query reads what it puts out.

    Queries, keys and values have passed a short causal convolution over each channel.
    """

    num_key_heads: int
    """Heads of queries and keys; each serves as many value heads as the next."""
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    """Tokens that a convolution sees, the newest included."""
    is_grouped: bool = False
    """Projections are stored as two matrices in which the rows of each key head lie together with
    those of its value heads, not as four."""
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
    def conv_channels(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.key_width + self.value_width

    @property
    def projected_width(self) -> int:
        """Width of all that is projected of a token: queries, keys, values, gates of the output,
        and of each value head a rate of learning and one of fading."""
        return self.conv_channels + self.value_width + 2 * self.num_value_heads

    def tensors(self, hidden_size: int) -> Sizes:
        """Sizes of the weights of a layer, by role."""
        D, heads = hidden_size, self.num_value_heads
        if self.is_grouped:
            sizes: Sizes = {
                "delta_qkvz": (self.conv_channels + self.value_width, D),
                "delta_ba": (2 * heads, D),
            }
        else:
            sizes = {
                "delta_qkv": (self.conv_channels, D),
                "delta_z": (self.value_width, D),
                "delta_b": (heads, D),
                "delta_a": (heads, D),
            }
        return sizes | {
            "delta_conv": (self.conv_channels, 1, self.conv_width),
            "delta_decay": (heads,),
            "delta_step": (heads,),
            "delta_norm": (self.value_head_dim,),
            "delta_o": (D, self.value_width),
        }

    def row_order(self, role: str) -> list[int] | None:
        """In which order the rows of a stored weight are computed with: queries, keys, values and
        gates, each in the order of heads. None where they lie so."""
        shared = self.num_value_heads // self.num_key_heads
        of_values = shared * self.value_head_dim
        parts = {
            "delta_qkvz": (self.key_head_dim, self.key_head_dim, of_values, of_values),
            "delta_ba": (shared, shared),
        }.get(role)
        return None if parts is None else rows_by_part(self.num_key_heads, parts)

    @property
    def state(self) -> CacheLayout:
        """What is kept of a sequence: the matrix of each value head, [keys, values], and what the
        next tokens' convolutions see."""
        matrix = self.key_head_dim * self.value_head_dim
        return CacheLayout(
            (
                CachePart("matrices", self.num_value_heads, matrix, self.state_dtype),
                CachePart("last inputs", self.conv_width - 1, self.conv_channels),
            )
        )

    @property
    def states_at_once(self) -> int:
        """Most sequences whose next token torch takes at once: states that are kept otherwise than
        they are computed with are copied."""
        return CHUNK_TOKENS if self.state_dtype == "float32" else _COPIED_STATES

    def step_bytes(self, compute_bytes: int, *, by_torch: bool) -> int:
        """Bytes that go through memory as one sequence takes a step in one layer: kernels read its
        state and write it, torch goes through the matrices once for each operator."""
        if not by_torch:
            return 2 * self.state.token_bytes(compute_bytes)
        return _TORCH_BYTES[self.state_dtype] * self.matrix_elements

    @property
    def decode_flops(self) -> int:
        """FLOP of a token in one layer beside its projections, token by token: fading, looking up,
        correcting and reading."""
        return self._conv_flops + 7 * self.matrix_elements

    @property
    def prompt_flops(self) -> int:
        """The same of a token among others of its prompt, in chunks (Yang et al. 2024, section
        3.3): keys and queries meet keys, a triangular system is solved for values and keys, and
        keys, queries and updates meet the matrix."""
        chunk, keys, values = CHUNK_TOKENS, self.key_head_dim, self.value_head_dim
        among = 4 * chunk * keys + chunk * (keys + values) + 2 * chunk * values
        return self._conv_flops + self.num_value_heads * (among + 6 * keys * values)

    @property
    def matrix_elements(self) -> int:
        """Numbers of a sequence in one layer, all heads."""
        return prod((self.num_value_heads, self.key_head_dim, self.value_head_dim))

    @property
    def _conv_flops(self) -> int:
        return 2 * self.conv_width * self.conv_channels
