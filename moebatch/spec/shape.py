"""Sizes, counts and kinds of a model, and what follows from them: no weights, no torch."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Literal

from moebatch.spec.hardware import Dtype
from moebatch.spec.latent_attention import LatentAttention

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from them is worked out once
class ModelShape:
    """A decoder with Mixture-of-Experts layers; enough for every byte and every FLOP of it."""

    architecture: str
    """Class name in ``architectures``, such as ``MixtralForCausalLM``."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of a head of queries and keys, the part without positions included."""
    vocab_size: int
    """Rows of the embedding and of the head; tokenizers often know fewer tokens."""
    tie_word_embeddings: bool
    """The head is the embedding; a separate head in the checkpoint is ignored."""
    moe_layers: tuple[int, ...]
    """Layers with experts, ascending; the others have one dense MLP."""
    num_experts: int
    experts_per_token: int
    expert_width: int
    dense_width: int
    """Width of the MLP of dense layers; 0 where the family has no such layers."""
    shared_expert_width: int
    """Width of the expert that every token of a MoE layer passes; 0 is none."""
    qkv_bias: bool
    output_bias: bool
    qk_norm: QkNorm
    """RMS norm of queries and keys: per head, over their full width, or none."""
    clip_qkv: float | None
    """Queries, keys and values are clamped to plus and minus this."""
    norm_topk_prob: bool
    """The weights of a token's chosen experts are made to sum to one."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many positions a token sees, itself included; None is all before it."""
    rms_eps: float
    activation: str
    """Name of the activation as transformers' ``hidden_act`` has it."""
    max_positions: int
    dtype: Dtype
    """Data type that the file declares: float32, float16 or bfloat16."""
    shared_expert_gate: bool = True
    """A sigmoid gate weighs the shared expert, where there is one."""
    moe_bias: bool = False
    """Routers and experts have biases."""
    attention_sinks: bool = False
    """Each head has a learnt score that takes part in its softmax."""
    latent: LatentAttention | None = None
    """Set where keys and values are compressed."""
    expert_bits_per_param: float | None = None
    """Bits that a number of an expert's matrices takes in a quantised checkpoint, scales
    included; None is as `dtype`."""

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer in self.moe_layers

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one number of the declared data type."""
        return 4 if self.dtype == "float32" else 2

    @property
    def query_width(self) -> int:
        """Width of the queries of a token, all heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of a token in one layer; the values are as wide. Latent attention
        caches less, see `cache_width`."""
        return self.num_kv_heads * self.head_dim

    @cached_property
    def cache_width(self) -> int:
        """Numbers that the cache holds of a token in one layer."""
        if self.latent:
            return self.latent.cache_width
        return 2 * self.kv_width

    @property
    def attention_flops_per_pair(self) -> int:
        """FLOP in one layer for a query and a position that it sees, scores and weighted sum,
        all heads: what prompt tokens take, whose keys and values lie there in full."""
        value_head_dim = self.latent.value_head_dim if self.latent else self.head_dim
        return 2 * self.num_heads * (self.head_dim + value_head_dim)

    @property
    def decode_flops_per_pair(self) -> int:
        """The same for a decoding query over cached positions.

        With latent attention queries are brought into the space of the latents ("absorbed",
        DeepSeek-V2, section 2.1.2), since making the keys and values of every cached position
        again for each token would cost far more. Bringing them there and back takes as much as
        the projections of the token's own keys and values, which `attention_params` counts.
        """
        if not self.latent:
            return self.attention_flops_per_pair
        return 2 * self.num_heads * (self.cache_width + self.latent.kv_rank)

    @cached_property
    def expert_params(self) -> int:
        """Numbers in one expert."""
        return self._expert_matrix_params + self._expert_bias_params

    @property
    def expert_stored_bytes(self) -> int:
        """Bytes of one expert in a checkpoint; biases are not quantised."""
        bits = self.expert_bits_per_param or 8 * self.dtype_bytes
        biases = self._expert_bias_params * self.dtype_bytes
        return ceil(self._expert_matrix_params * bits / 8) + biases

    @cached_property
    def embedding_params(self) -> int:
        """Numbers in the embedding, the final norm and, where it is not tied, the head."""
        tables = 1 if self.tie_word_embeddings else 2
        return tables * self.vocab_size * self.hidden_size + self.hidden_size

    def resident_layer_params(self, layer: int) -> int:
        """Numbers in a layer beside its experts: norms, attention, router, shared expert, MLP."""
        return self._resident_params_of(is_moe=self.is_moe(layer))

    def _resident_params_of(self, *, is_moe: bool) -> int:
        params = 2 * self.hidden_size + self.attention_params
        if not is_moe:
            return params + 3 * self.hidden_size * self.dense_width
        params += self.num_experts * (self.hidden_size + self.moe_bias)  # router
        if self.shared_expert_width:
            params += 3 * self.hidden_size * self.shared_expert_width
            params += self.hidden_size * self.shared_expert_gate
        return params

    @cached_property
    def resident_params(self) -> int:
        """Numbers outside the experts."""
        with_experts = len(self.moe_layers)
        params = self.embedding_params + with_experts * self._resident_params_of(is_moe=True)
        return params + (self.num_layers - with_experts) * self._resident_params_of(is_moe=False)

    @cached_property
    def num_params(self) -> int:
        """Numbers in the whole model."""
        return self.resident_params + len(self.moe_layers) * self.num_experts * self.expert_params

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of the cache of one token in all layers, sliding windows or not."""
        return self.num_layers * self.cache_width * dtype_bytes

    @cached_property
    def attention_params(self) -> int:
        """Numbers in the attention of one layer: projections, biases, norms and sinks."""
        projections = self._latent_params(self.latent) if self.latent else self._head_params
        params = projections + self.hidden_size * self.output_bias
        params += self.num_heads * self.attention_sinks
        if self.qk_norm == "head":
            params += 2 * self.head_dim
        elif self.qk_norm == "full":
            params += self.query_width + self.kv_width
        return params

    @property
    def _head_params(self) -> int:
        params = 2 * self.hidden_size * self.query_width  # queries, output
        params += 2 * self.hidden_size * self.kv_width  # keys, values
        return params + (self.query_width + 2 * self.kv_width) * self.qkv_bias

    def _latent_params(self, latent: LatentAttention) -> int:
        if latent.query_rank is None:
            params = self.hidden_size * self.query_width
        else:
            params = latent.query_rank * (self.hidden_size + self.qkv_bias)
            params += latent.query_rank * (1 + self.query_width)  # norm, queries
        params += self.cache_width * (self.hidden_size + self.qkv_bias)
        value_width = self.num_heads * latent.value_head_dim
        key_width = self.query_width - self.num_heads * latent.rope_head_dim
        params += latent.kv_rank * (1 + key_width + value_width)  # norm, keys, values
        return params + value_width * self.hidden_size  # output

    @property
    def _expert_matrix_params(self) -> int:
        return 3 * self.hidden_size * self.expert_width  # gate, up, down

    @property
    def _expert_bias_params(self) -> int:
        return (2 * self.expert_width + self.hidden_size) * self.moe_bias
