"""Sizes, counts and kinds of a model, and what follows from them: no weights, no torch.

Shape letters: D hidden.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, TypeVar

from moebatch.errors import ConfigError
from moebatch.formats.weight_format import WeightFormat
from moebatch.spec.machine.hardware import Dtype
from moebatch.spec.model.attention import Attention, Sizes
from moebatch.spec.model.blocks import (
    ClampedGate,
    Mixing,
    Mlp,
    Norm,
    NormGates,
    OutNorms,
    Residual,
    Router,
    Streams,
)
from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.cache_layout import UNLIMITED, CacheLayout, KvCache, SinkWindow, StateCache
from moebatch.spec.model.grouped_attention import RelativeAttention
from moebatch.spec.model.recurrence import Recurrence
from moebatch.spec.workload import Workload

_NORMS_OF_MIXERS = ("input_norm", "attention_out_norm")
"""Of the norms of a layer those before its experts or MLP."""
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """The first layers of a model whose prompts are encoded (Vaswani et al. 2017).

    They are for tokens of prompts, of which each sees all others, and keep nothing of them. The
    layers behind them decode: answers begin with a token of their own, and attend to themselves
    and to what the encoder has made of their prompts. Of that these layers cache keys and values;
    tokens of prompts have nothing else to do there.
    """

    num_layers: int
    start_token: int
    """The token with which answers begin: it is counted as the last one of their prompts."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What a family composes its layers of."""

    attention: Attention
    """Of all layers that attend, but for what `layer_attentions` say."""
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer: how many positions a token sees, itself included; None is all before it. A family
    of which all layers see everything leaves it out."""
    windows_are_chunks: bool = False
    """Windows stand still: a token sees what comes before it in its own one, and they begin at
    multiples of their size (Llama 4)."""
    moe_layers: tuple[int, ...]
    """Layers with experts, ascending; the others have one dense MLP."""
    router: Router
    expert: Mlp
    latent_width: int | None = None
    """Width of what experts see and make, where it is not that of hidden states: these are brought
    to it by one matrix, and what a token's experts make together is brought back by another. The
    gate and the shared expert see hidden states (Nemotron 3)."""
    latent_bias: bool = False
    """Both matrices have one."""
    norms_latents: bool = False
    """Experts see norms of what the first one makes."""
    adds_experts_late: bool = False
    """What the experts of a layer make is added at the end of the next one, which has an MLP
    ("shortcut-connected", Cai et al. 2024); what the shared expert makes, at once. All the same
    experts are computed before the next layer begins."""
    adds_attention_late: bool = False
    """What attention makes is added with what experts or an MLP make, which see the same as it does
    ("parallel": Wang & Komatsuzaki 2021, GPT-J-6B)."""
    shared_expert: Mlp | None = None
    """The expert that every token of a MoE layer passes."""
    shared_scale: float = 1.0
    """By what that is multiplied which the shared expert makes."""
    shared_expert_gate: bool = False
    """A sigmoid gate weighs the shared expert, where there is one."""
    dense: Mlp | None = None
    """The MLP of layers without experts; None where the family has no such layers."""
    bare_layers: tuple[int, ...] = ()
    """Layers that end behind attention or recurrence: they have neither experts nor an MLP."""
    file_numbers: tuple[tuple[int, int], ...] = ()
    """Of each layer the number in names of tensors of what mixes tokens, and that of its experts or
    MLP, where files number them one by one; a layer without the latter has one number twice. Where
    a layer of the file is several here, its number and that of the part. Empty where layers are
    numbered as here."""
    expert_clamps: tuple[ClampedGate | None, ...] = ()
    """Per layer: what its experts do between their matrices; None is the usual ``activation(gate) *
    up``. Empty where that holds for all layers."""
    mlp_clamps: tuple[ClampedGate | None, ...] = ()
    """The same of its shared expert, or of its MLP where it has no experts."""
    norms: tuple[str, ...] = ("input_norm", "mlp_norm")
    """Roles of the norms of a layer, [D] each; without one of these two hidden states are taken as
    they are. What attention has made may be normed before it is added, ``attention_out_norm``, and
    so may what experts and MLPs have made together, ``mlp_out_norm``. Experts and the shared one
    may have such of their own before, ``experts_out_norm`` and ``shared_out_norm``; ``shared_norm``
    is what the shared one sees of hidden states, where that is not what experts see."""
    moe_norms: tuple[str, ...] = ()
    """Roles of those that only layers with experts have beside these."""
    out_norms: OutNorms | None = None
    """None where norms of what has been made are like those before."""
    norms_each_expert: bool = False
    """What each expert makes is normed before it is weighed, with weights that all of a layer
    share: `out_norms` says how."""
    scales_layers: bool = False
    """Hidden states are multiplied by a learnt number at the end of each layer."""
    recurrence: Recurrence | None = None
    """What takes the place of attention in `recurrent_layers`."""
    recurrent_layers: tuple[int, ...] = ()
    """Ascending; all others attend."""
    layer_attentions: tuple[Attention, ...] = ()
    """That of each layer, where they attend in several ways; `attention` is one of these."""
    streams: Streams | None = None
    """None where hidden states of a token are one."""
    hashed_layers: tuple[int, ...] = ()
    """Those with experts in which these are looked up by the token, and not chosen (Roller et al.
    2021)."""
    norm: Norm = field(default_factory=Norm)
    num_learnt_frequencies: int = 0
    """Those of rotary positions, where each is multiplied by the exponential of a learnt number
    (LeRoPE)."""
    norm_gates: NormGates | None = None
    """None where no norm weighs what it makes."""
    encoder: Encoder | None = None
    """None where prompts go through the same layers as answers."""
    norms_embedding: bool = False
    """Embeddings are normed before the first layer, without weights."""
    embedding_scale: float = 1.0
    """By what embeddings are multiplied before the first layer."""
    divides_by_depth: bool = False
    """Parts of layers weigh as much as embeddings: hidden states are the sum of what all so far
    have made, divided by the root of their number (Beam). Here they are kept as sums: norms make
    the same of them."""
    attention_residual: Residual = field(default_factory=Residual)
    """How what attention has made is added to hidden states."""
    recurrent_residual: Residual = field(default_factory=Residual)
    """The same of `recurrence`."""
    mlp_residual: Residual = field(default_factory=Residual)
    """The same of experts and MLPs."""
    rounds_embedding_scale: bool = False
    """To the type in which is computed."""
    logit_scale: float = 1.0
    """By what logits are multiplied."""
    head_bias: bool = False
    """The head has one."""
    logit_cap: float | None = None
    """Logits are brought between minus and plus this by its tanh."""


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from them is worked out once
class ModelShape(Layers):
    """A decoder with Mixture-of-Experts layers; enough for every byte and every FLOP of it."""

    architecture: str
    """Class name in ``architectures``, such as ``MixtralForCausalLM``."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the embedding and of the head; tokenizers often know fewer tokens."""
    tie_word_embeddings: bool
    """The head is the embedding; a separate head in the checkpoint is used all the same."""
    num_experts: int
    experts_per_token: int
    rms_eps: float
    activation: str
    """Name of the activation as transformers' ``hidden_act`` has it."""
    max_positions: int
    """Most tokens of a sequence."""
    dtype: Dtype
    """Data type that the file declares: float32, float16 or bfloat16."""
    expert_format: WeightFormat
    """In which the checkpoint stores experts, as far as ``config.json`` says; biases are not
    quantised."""

    @property
    def is_swiglu(self) -> bool:
        """Whether what gates do is SiLU, or that of clamped inputs."""
        clamps = self.expert_clamps
        return self.activation in ("silu", "swish") or (bool(clamps) and None not in clamps)

    def expert_clamp(self, layer: int) -> ClampedGate | None:
        return self.expert_clamps[layer] if self.expert_clamps else None

    def mlp_clamp(self, layer: int) -> ClampedGate | None:
        return self.mlp_clamps[layer] if self.mlp_clamps else None

    def is_moe(self, layer: int) -> bool:
        return layer in self._with_experts

    def has_mlp(self, layer: int) -> bool:
        return layer not in self._bare

    def norms_of(self, layer: int) -> tuple[str, ...]:
        if not self.has_mlp(layer):
            return tuple(role for role in self.norms if role in _NORMS_OF_MIXERS)
        return self.norms + self.moe_norms * self.is_moe(layer)

    def is_unweighed(self, norm: str) -> bool:
        """Whether a norm of what has been made has no weights."""
        return self.out_norms is not None and norm in self.out_norms.unweighed

    @property
    def out_eps(self) -> float:
        """What is added to mean squares of what has been made."""
        return self.rms_eps if self.out_norms is None else self.out_norms.eps

    @property
    def places_unweighed(self) -> bool:
        """Whether what experts make is not weighed when it is put in its place: weights have been
        for what they see, or will be for norms of it."""
        return self.router.weighs_inputs or self.norms_each_expert

    def norm_eps(self, role: str, layer: int | None) -> float:
        """What is added to mean squares of hidden states where a layer norms them, or behind the
        last one where `layer` is None; in proportion to what they would be divided by."""
        if not self.divides_by_depth:
            return self.rms_eps
        num_parts = 2 * (self.num_layers if layer is None else layer) + 1
        return self.rms_eps * (num_parts + (role == self.norm_of_mlps))

    @property
    def norm_of_mlps(self) -> str:
        """Role of the norm before experts and MLPs."""
        return "input_norm" if self.adds_attention_late else "mlp_norm"

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer has a recurrence in the place of attention."""
        return layer in self._recurrent

    def mixer_residual(self, layer: int) -> Residual:
        """How what attention, or recurrence, of a layer has made is added to hidden states."""
        return self.recurrent_residual if self.is_recurrent(layer) else self.attention_residual

    def attention_of(self, layer: int) -> Attention:
        return self.layer_attentions[layer] if self.layer_attentions else self.attention

    def by_layer(self, make: Callable[[Attention], Made]) -> list[Made]:
        """What is made for the attention of each layer, once for those that attend alike."""
        made = {each: make(each) for each in self.attentions}
        return [made[self.attention_of(layer)] for layer in range(self.num_layers)]

    def state_of(self, layer: int) -> CacheLayout | None:
        """What a layer keeps of a sequence beside what it caches of tokens."""
        if self.is_recurrent(layer):
            return self.recurrence.state if self.recurrence else None
        return self.attention_of(layer).state

    @cached_property
    def hidden_width(self) -> int:
        """Numbers of a token between layers."""
        return self.hidden_size * (self.streams.count if self.streams else 1)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """All ways in which layers attend."""
        return tuple(dict.fromkeys((self.attention, *self.layer_attentions)))

    def encodes(self, layer: int) -> bool:
        """Whether a layer is the encoder's."""
        return layer < self.num_encoding_layers

    @property
    def num_encoding_layers(self) -> int:
        """Layers that are for prompts alone, the first ones."""
        return self.encoder.num_layers if self.encoder else 0

    @cached_property
    def num_keeping_layers(self) -> int:
        """Layers that keep something of a sequence: keys and values, or a state."""
        return self.num_layers - self.num_encoding_layers

    def place_of(self, layer: int) -> Mapping[str, object]:
        """What names of tensors may say of a layer: its number and that of its MLP, as
        `numbers_of` has them, and where there is an encoder its stack, in which it is counted, and
        the number of the part that holds its MLP."""
        if self.encoder is None:
            number, of_mlp = self.numbers_of(layer)
            return {"layer": number, "mlp": of_mlp}
        if self.encodes(layer):
            return {"stack": "encoder", "layer": layer, "mlp": 1}
        return {"stack": "decoder", "layer": layer - self.encoder.num_layers, "mlp": 2}

    def numbers_of(self, layer: int) -> tuple[int, int]:
        """Those of a layer and of its MLP in a model that numbers them as `file_numbers` says."""
        return self.file_numbers[layer] if self.file_numbers else (layer, layer)

    @cached_property
    def _with_experts(self) -> frozenset[int]:
        return frozenset(self.moe_layers)

    @cached_property
    def _bare(self) -> frozenset[int]:
        return frozenset(self.bare_layers)

    @cached_property
    def _recurrent(self) -> frozenset[int]:
        return frozenset(self.recurrent_layers)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one number of the declared data type."""
        return 4 if self.dtype == "float32" else 2

    @property
    def expert_width(self) -> int:
        return self.expert.width

    @property
    def shared_expert_width(self) -> int:
        """Width of the shared expert; 0 where there is none."""
        return self.shared_expert.width if self.shared_expert else 0

    @property
    def dense_width(self) -> int:
        """Width of the MLP of layers without experts; 0 where the family has no such layers."""
        return self.dense.width if self.dense else 0

    @property
    def num_choices(self) -> int:
        """What a gate chooses among: experts, and what gives back what it sees."""
        return self.num_experts + self.router.num_identities

    @cached_property
    def computed_per_token(self) -> float:
        """Experts that compute something for a token, in the mean where all choices are alike."""
        return self.experts_per_token * self.num_experts / self.num_choices

    @property
    def expert_size(self) -> int:
        """Numbers that an expert sees of a token, and makes of it."""
        return self.latent_width or self.hidden_size

    @cached_property
    def expert_params(self) -> int:
        return _count(self.expert.tensors(self.expert_size))

    @cached_property
    def expert_bias_params(self) -> int:
        """Those of them that are biases."""
        return self.expert_params - _count(self.expert.matrices(self.expert_size))

    def expert_bytes(self, stored: WeightFormat) -> int:
        """Bytes of one expert whose matrices are stored in a format. Biases are not quantised."""
        if stored not in self._expert_bytes:
            matrices = self.expert.matrices(self.expert_size)
            num_bytes = sum(map(stored.num_bytes, matrices.values()))
            self._expert_bytes[stored] = num_bytes + self.expert_bias_params * self.dtype_bytes
        return self._expert_bytes[stored]

    @cached_property
    def _expert_bytes(self) -> dict[WeightFormat, int]:
        return {}

    def global_tensors(self) -> Sizes:
        """Sizes of what no layer owns, by role; a tied head is none of its own."""
        sizes: Sizes = {"embedding": (self.vocab_size, self.hidden_size)}
        sizes |= self._norm_tensors("final_norm") | self._encoder_tensors
        if self.streams:
            sizes |= self.streams.tensors("final_norm", self.hidden_size, spreads=False)
        if self.num_learnt_frequencies:
            sizes["rotary_growth"] = (self.num_learnt_frequencies,)
        if self.head_bias:
            sizes["head_bias"] = (self.vocab_size,)
        return sizes if self.tie_word_embeddings else sizes | {"head": sizes["embedding"]}

    def layer_tensors(self, layer: int) -> Sizes:
        """Sizes of everything in a layer but its experts, by role."""
        scale: Sizes = {"layer_scale": (1,)} if self.scales_layers else {}
        roles = (role for role in self.norms_of(layer) if not self.is_unweighed(role))
        norms = self._norm_tensors(*roles) | self._mixing_tensors(layer)
        streams: Sizes = {}
        for role in ("input_norm", "mlp_norm") if self.streams else ():
            assert self.streams is not None, "there are several"
            streams |= self.streams.tensors(role, self.hidden_size)
        norms |= self._norm_gate_tensors(layer)
        return norms | self.mixer_tensors(layer) | self._mlp_tensors(layer) | scale | streams

    def streamed_tensors(self, layer: int) -> Sizes:
        """Those that may come up from the level below for each pass: matrices, but for those of
        gates, at which other layers look."""
        return {
            role: size
            for role, size in self.layer_tensors(layer).items()
            if self.is_streamed(role, size)
        }

    @staticmethod
    def is_streamed(role: str, size: tuple[int, ...]) -> bool:
        """Whether one of that size may."""
        is_exact = role.endswith(("_streams", "entry_bias", "pool_bias"))
        return len(size) == 2 and not role.startswith("router") and not is_exact

    def streamed(self, count: int) -> tuple[int, ...]:
        """Which layers do so where so many do: those that take least, as all need room for the
        largest, spread over the pass."""
        if not count:
            return ()
        sizes = self.streamed_params
        least = sorted(range(self.num_layers), key=lambda layer: (sizes[layer], layer))
        alike = [layer for layer in least if sizes[layer] <= sizes[least[count - 1]]]
        layers = sorted(alike)
        return tuple(layers[n * len(layers) // count] for n in range(count))

    @cached_property
    def streamed_params(self) -> tuple[int, ...]:
        """Numbers that may come up with each layer."""
        return tuple(_count(self.streamed_tensors(layer)) for layer in range(self.num_layers))

    def mixer_tensors(self, layer: int) -> Sizes:
        """Sizes of the attention of a layer, or of its recurrence, by role: what tells tokens of
        each other."""
        if self.is_recurrent(layer):
            assert self.recurrence is not None, "layers are recurrent by one"
            return self.recurrence.tensors(self.hidden_size)
        tensors = self.attention_of(layer).tensors(self.hidden_size)
        if isinstance(self.attention, RelativeAttention) and not self.encodes(layer):
            tensors |= self.attention.cross_tensors(self.hidden_size)
        return tensors

    def row_order(self, role: str, layer: int) -> list[int] | None:
        """In which order the rows of a stored weight are computed with; None where they lie so."""
        order = self.attention_of(layer).row_order(role)
        return order if order or not self.recurrence else self.recurrence.row_order(role)

    def _norm_tensors(self, *roles: str) -> Sizes:
        biases = [f"{role}_bias" for role in roles if self.norm.has_bias]
        return dict.fromkeys((*roles, *biases), (self.hidden_size,))

    def mixing_of(self, role: str, layer: int) -> Mixing | None:
        """That of which a tensor of that role has the shares, if it has such."""
        if role == "mixer_share":
            return self.mixer_residual(layer).mixing
        return self.mlp_residual.mixing if role == "mlp_share" else None

    def _mixing_tensors(self, layer: int) -> Sizes:
        roles = ("mixer_share", "mlp_share")[: 1 + self.has_mlp(layer)]
        return {role: (self.hidden_size,) for role in roles if self.mixing_of(role, layer)}

    def _norm_gate_tensors(self, layer: int) -> Sizes:
        sizes: Sizes = {}
        if (gates := self.norm_gates) is not None:
            for role in gates.roles + gates.moe_roles * self.is_moe(layer):
                sizes |= gates.tensors(role, self.hidden_size)
        return sizes

    @cached_property
    def _encoder_tensors(self) -> Sizes:
        """The norm behind an encoder, and what both stacks add to scores."""
        if self.encoder is None:
            return {}
        assert isinstance(self.attention, RelativeAttention), "that of encoders"
        biases = (self.attention.num_buckets, self.attention.num_heads)
        return self._norm_tensors("encoder_norm") | {
            "encoder_bias": biases,
            "decoder_bias": biases,
        }

    def _mlp_tensors(self, layer: int) -> Sizes:
        if layer in self.hashed_layers:
            table = {"router_table": (self.vocab_size, self.experts_per_token)}
            chosen = {k: v for k, v in self._moe_tensors.items() if k != "router_correction"}
            return chosen | table
        if self.is_moe(layer):
            return self._moe_tensors
        return self._dense_tensors if self.has_mlp(layer) else {}

    @cached_property
    def _dense_tensors(self) -> Sizes:
        return _prefixed("mlp", self.dense, self.hidden_size)

    @cached_property
    def _moe_tensors(self) -> Sizes:
        D = self.hidden_size
        moe: Sizes = {"router": (self.num_choices, D)}
        if self.router.bias:
            moe["router_bias"] = (self.num_choices,)
        if self.router.has_correction:
            moe["router_correction"] = (self.num_choices,)
        if self.router.has_own_norm:
            moe["router_norm"] = (D,)
        if self.router.weighs_experts:
            moe["router_expert_weights"] = (self.num_choices,)
        if self.latent_width is not None:
            L = self.latent_width
            moe |= {"latent_in": (L, D), "latent_out": (D, L)}
            if self.latent_bias:
                moe |= {"latent_in_bias": (L,), "latent_out_bias": (D,)}
            if self.norms_latents:
                moe["latent_norm"] = (L,)
        if self.norms_each_expert:
            moe["each_expert_norm"] = (self.expert_size,)
        if self.shared_expert:
            moe |= _prefixed("shared", self.shared_expert, D)
            if self.shared_expert_gate:
                moe["shared_mix"] = (1, D)
        return moe

    @cached_property
    def embedding_params(self) -> int:
        """Numbers in the embedding, the final norm and, where it is not tied, the head."""
        return _count(self.global_tensors())

    def resident_layer_params(self, layer: int) -> int:
        """Numbers in a layer beside its experts: norms, attention or recurrence, router, shared
        expert, MLP."""
        return _count(self.layer_tensors(layer))

    def shared_expert_params(self, layer: int) -> int:
        """Those of the expert that all tokens of the layer share."""
        sizes = self.layer_tensors(layer).items()
        return sum(prod(size) for role, size in sizes if role.startswith("shared_"))

    @cached_property
    def resident_params(self) -> int:
        """Numbers outside the experts."""
        return self.embedding_params + sum(map(self.resident_layer_params, range(self.num_layers)))

    @property
    def exact_roles(self) -> frozenset[str]:
        """Tensors that are held in float32, whatever is computed in."""
        of_recurrence = self.recurrence.exact_roles if self.recurrence else frozenset()
        of_attention = self.attention.exact_roles
        of_streams = {
            f"{norm}_streams{end}"
            for norm in ("input_norm", "mlp_norm", "final_norm")
            for end in ("", "_base", "_scale")
        }
        found = self.router.exact_roles | self.norm.exact_roles | of_recurrence | of_attention
        shares = {"mixer_share", "mlp_share"}
        return found | of_streams | shares | {"router_table", "rotary_growth"}

    @cached_property
    def exact_params(self) -> int:
        """Numbers in these."""
        of_layers = (self.layer_tensors(layer) for layer in range(self.num_layers))
        return sum(
            prod(size)
            for sizes in (self.global_tensors(), *of_layers)
            for role, size in sizes.items()
            if role in self.exact_roles
        )

    @cached_property
    def num_params(self) -> int:
        """Numbers in the whole model."""
        return self.resident_params + len(self.moe_layers) * self.num_experts * self.expert_params

    def mixer_params(self, layer: int) -> int:
        """Numbers in the attention of a layer, or in its recurrence."""
        return _count(self.mixer_tensors(layer))

    @cached_property
    def all_mixer_params(self) -> int:
        """The same of all layers together."""
        return sum(map(self.mixer_params, range(self.num_layers)))

    @property
    def attends_beside_gpu(self) -> bool:
        """Whether a CPU beside a GPU may attend: all layers do, to what they cache alone, and to
        all of that."""
        keeps_states = any(map(self.state_of, range(self.num_layers)))
        return self.encoder is None and not keeps_states and self.attention.most_chosen is None

    @cached_property
    def attending(self) -> tuple[Attention, ...]:
        """How each layer attends that does."""
        layers = range(self.num_layers)
        return tuple(self.attention_of(n) for n in layers if not self.is_recurrent(n))

    def kv_bytes_per_token(self, compute_bytes: int) -> int:
        """Bytes of the cache of one token in all layers that have one, sliding windows or not,
        where numbers that are computed with have so many."""
        return self._kept_bytes(compute_bytes, in_states=False)

    def state_bytes(self, compute_bytes: int) -> int:
        """Bytes of what recurrent layers keep of a sequence, all of them."""
        return self._kept_bytes(compute_bytes, in_states=True)

    def _kept_bytes(self, compute_bytes: int, *, in_states: bool) -> int:
        return sum(
            len(group.layers) * group.layout.token_bytes(compute_bytes)
            for group in self.cache_groups(UNLIMITED)
            if group.is_state == in_states
        )

    def cache_groups(self, max_tokens: int) -> tuple[CacheGroup, ...]:
        """All layers by what the cache holds of sequences of at most so many tokens, those first
        that keep most. Where a window is no shorter than what would be kept for it, all is
        kept."""
        if max_tokens not in self._cache_groups:
            self._cache_groups[max_tokens] = self._grouped(max_tokens)
        return self._cache_groups[max_tokens]

    @cached_property
    def _cache_groups(self) -> dict[int, tuple[CacheGroup, ...]]:
        return {}

    def _grouped(self, max_tokens: int) -> tuple[CacheGroup, ...]:
        found: dict[tuple[int, SinkWindow | None, CacheLayout], list[int]] = {}
        for layer, seen in enumerate(map(self._seen_through, self.sliding_windows)):
            if self.is_recurrent(layer) or self.encodes(layer):
                continue
            is_kept = seen is None or seen.most_cached >= max_tokens
            kept = None if is_kept else seen
            for number, layout in enumerate(self.attention_of(layer).caches):
                found.setdefault((number, kept, layout), []).append(layer)
        in_order = sorted(found.items(), key=lambda each: each[0][0])  # as layers take their parts
        groups = [
            CacheGroup(layers=tuple(layers), layout=layout, sink_window=seen)
            for (_, seen, layout), layers in in_order
        ]
        assert groups, "some layers attend"
        states: dict[CacheLayout, list[int]] = {}
        for layer in range(self.num_layers):
            if (state := self.state_of(layer)) is not None:
                states.setdefault(state, []).append(layer)
        groups += [
            CacheGroup(layers=tuple(layers), layout=layout, is_state=True)
            for layout, layers in states.items()
        ]
        return tuple(sorted(groups, key=lambda group: -group.most_rows))

    def _seen_through(self, window: int | None) -> SinkWindow | None:
        """What tokens see in a layer with a sliding window."""
        sinks = self.attention.sink_window
        if sinks is not None and sinks.window == window:
            return sinks
        return None if window is None else SinkWindow(0, window)

    def cached(self, workload: Workload) -> Workload:
        """The same work as the cache holds it: sequences share nothing where less than all of them
        is kept, or what is kept of a token depends on those behind it."""
        if self.encoder is not None:
            return replace(workload.unshared, is_encoded=True)
        groups = self.cache_groups(workload.max_total_tokens)
        if all(group.is_whole for group in groups):
            return workload
        return replace(workload.unshared, most_cached=groups[0].most_rows)

    def cached_in(self, how: KvCache = "full", states: StateCache = "full") -> "ModelShape":
        """The same model with keys and values, and states, cached so. Raises ConfigError where
        states are to be kept otherwise that there are none of."""
        shape = self._with_attention(cache_dtype=None if how == "full" else how)
        if states == "full":
            return shape
        if self.recurrence is None or self.recurrence.state_dtype is None:
            message = f"{self.architecture} keeps no states in float32; leave it out"
            raise ConfigError.at("resources.state_cache", message)
        return replace(shape, recurrence=replace(self.recurrence, state_dtype=states))

    def seen_through(self, sink_window: SinkWindow | None) -> "ModelShape":
        """The same model where tokens see sinks and a window, save in layers whose own windows are
        shorter. Raises ConfigError where queries cannot be turned to sinks, or prompts are
        encoded."""
        if sink_window is None:
            return self
        does, unturned = "", ", so that none can be turned to sinks"
        chosen, within = self.attention.most_chosen, self.attending_within(sink_window.num_seen)
        if self.encoder is not None:
            does = "encodes prompts whole, without windows"
        elif any(map(self.state_of, range(self.num_layers))) and self.recurrence is None:
            does = "sees what lies before its window in entries that stand for several tokens"
        elif chosen is not None and sink_window.num_seen > chosen:
            does = f"has tokens choose {chosen} of those that they see, fewer than {sink_window}"
        elif len(within.attentions) > 1:
            does = f"attends in two ways{unturned}"
        elif not self.attention.rotary_dim:
            does = f"has no rotary positions{unturned}"
        elif self.attention.temperature is not None:
            does = f"multiplies queries by what their positions say{unturned}"
        elif self.attention.norms_rotated:
            does = f"norms queries behind their rotation{unturned}"
        if does:
            message = f"{self.architecture} {does}; leave it out"
            raise ConfigError.at("model.attention", message)
        most = sink_window.window
        windows = (most if own is None else min(own, most) for own in self.sliding_windows)
        shape = within._with_attention(sink_window=sink_window)
        return replace(shape, sliding_windows=tuple(windows))

    def attending_within(self, max_tokens: int) -> "ModelShape":
        """The same model for sequences of at most so many tokens: without what chooses among them
        where all are chosen, and with room for as much as these keep."""
        return self._attending(lambda attention: attention.within(max_tokens))

    def _with_attention(self, **changes: Any) -> "ModelShape":
        """The same model with changes to all attention."""
        return self._attending(lambda attention: replace(attention, **changes))

    def _attending(self, change: Callable[[Attention], Attention]) -> "ModelShape":
        """The same model with that change to all attention; itself if that leaves all as it is."""
        changed = {each: change(each) for each in self.attentions}
        if all(old == new for old, new in changed.items()):
            return self
        return replace(
            self,
            attention=changed[self.attention],
            layer_attentions=tuple(changed[each] for each in self.layer_attentions),
        )


def _prefixed(prefix: str, mlp: Mlp | None, hidden_size: int) -> Sizes:
    tensors = mlp.tensors(hidden_size) if mlp else {}
    return {f"{prefix}_{role}": size for role, size in tensors.items()}


def _count(sizes: Sizes) -> int:
    return sum(map(prod, sizes.values()))
