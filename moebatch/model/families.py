"""Which tensors a family's checkpoint holds, under which names and in which shapes.

Two layouts of experts are in use: three matrices per expert, as released checkpoints have it, and
all experts of a layer stacked in two tensors, as transformers 5 holds them in memory.

Shape letters: D hidden, F expert width, E experts.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from moebatch.spec.shape import ModelShape

_LAYER = "model.layers.{layer}."
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FUSED_GATE_UP = _LAYER + "mlp.experts.gate_up_proj"
_FUSED_DOWN = _LAYER + "mlp.experts.down_proj"


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint, or one slice of it along the first dimension."""

    name: str
    index: int | None


class ExpertWeights(NamedTuple):
    """The three matrices of a gated MLP."""

    gate_FD: Tensor
    up_FD: Tensor
    down_DF: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Names of the tensors of one architecture. `names` is what the checkpoint holds."""

    routers: tuple[str, ...]
    """Templates of the router's name, the one of released checkpoints first."""
    experts: tuple[str, str, str]
    """Templates of the names of an expert's gate, up and down matrix."""

    def global_tensors(self, shape: ModelShape, names: Container[str]) -> dict[str, str]:
        """Role to name of what no layer owns.

        A head that is tied but present all the same is used, since it may differ from the
        embedding, and transformers then uses it too.
        """
        tensors = {"embedding": _EMBEDDING, "final_norm": "model.norm.weight"}
        if not shape.tie_word_embeddings or _HEAD in names:
            tensors["head"] = _HEAD
        return tensors

    def layer_tensors(self, shape: ModelShape, layer: int, names: Container[str]) -> dict[str, str]:
        """Role to name of everything in a layer but its experts."""
        prefix = _LAYER.format(layer=layer)
        tensors = {role: prefix + _LAYER_NAMES[role] for role in _layer_roles(shape, layer)}
        if shape.is_moe(layer):
            routers = [router.format(layer=layer) for router in self.routers]
            tensors["router"] = next((name for name in routers if name in names), routers[0])
        return tensors

    def expert_parts(
        self, shape: ModelShape, layer: int, expert: int, names: Container[str]
    ) -> tuple[Part, ...]:
        """Gate, up and down of an expert, or gate-with-up and down where they are stacked."""
        assert shape.is_moe(layer), f"layer {layer} has no experts"
        fused = _FUSED_GATE_UP.format(layer=layer)
        if fused in names:
            return Part(fused, expert), Part(_FUSED_DOWN.format(layer=layer), expert)
        return tuple(Part(name.format(layer=layer, expert=expert), None) for name in self.experts)


def family_of(shape: ModelShape) -> Family:
    """The names of the shape's architecture."""
    return _FAMILIES[shape.architecture]


def expert_weights(parts: Sequence[Tensor]) -> ExpertWeights:
    """Views of the tensors of `Family.expert_parts` as three matrices; nothing is copied."""
    if len(parts) == 2:
        gate_up, down_DF = parts
        gate_FD, up_FD = gate_up.chunk(2)
        return ExpertWeights(gate_FD, up_FD, down_DF)
    gate_FD, up_FD, down_DF = parts
    return ExpertWeights(gate_FD, up_FD, down_DF)


def required_tensors(shape: ModelShape, names: Container[str]) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must hold and its shape, experts included.

    The embedding and the head have exactly ``vocab_size`` rows; where a vocabulary is padded,
    ``vocab_size`` counts the padding and the tokenizer knows fewer tokens.
    """
    family, shapes = family_of(shape), _expected_shapes(shape)
    tensors = {name: role for role, name in family.global_tensors(shape, names).items()}
    for layer in range(shape.num_layers):
        layer_tensors = family.layer_tensors(shape, layer, names)
        tensors |= {name: role for role, name in layer_tensors.items()}
    tensors.update(_expert_tensors(shape, names))
    return {name: shapes[role] for name, role in tensors.items()}


def expected_shape(shape: ModelShape, role: str) -> tuple[int, ...]:
    """Shape of the tensor in a role.

    Roles are those of `Family.global_tensors` and `Family.layer_tensors`, and for experts
    ``expert_gate``, ``expert_up``, ``expert_down``, ``experts_gate_up`` and ``experts_down``.
    """
    return _expected_shapes(shape)[role]


def _expected_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    D, V, E = shape.hidden_size, shape.vocab_size, shape.num_experts
    F, shared, dense = shape.expert_width, shape.shared_expert_width, shape.dense_width
    queries, keys = shape.query_width, shape.kv_width
    is_full = shape.qk_norm == "full"
    shapes: dict[str, tuple[int, ...]] = {
        "q": (queries, D),
        "k": (keys, D),
        "v": (keys, D),
        "o": (D, queries),
        "q_norm": (queries if is_full else shape.head_dim,),
        "k_norm": (keys if is_full else shape.head_dim,),
        "router": (E, D),
        "shared_mix": (1, D),
        "experts_gate_up": (E, 2 * F, D),
        "experts_down": (E, D, F),
    }
    shapes |= {f"{role}_bias": shapes[role][:1] for role in "qkvo"}
    shapes |= dict.fromkeys(("embedding", "head"), (V, D))
    shapes |= dict.fromkeys(("final_norm", "input_norm", "mlp_norm"), (D,))
    for prefix, width in (("shared", shared), ("mlp", dense), ("expert", F)):
        shapes |= dict.fromkeys((f"{prefix}_gate", f"{prefix}_up"), (width, D))
        shapes[f"{prefix}_down"] = (D, width)
    return shapes


def _layer_roles(shape: ModelShape, layer: int) -> Iterator[str]:
    yield from ("input_norm", "mlp_norm", "q", "k", "v", "o")
    if shape.qkv_bias:
        yield from ("q_bias", "k_bias", "v_bias")
    if shape.output_bias:
        yield "o_bias"
    if shape.qk_norm != "none":
        yield from ("q_norm", "k_norm")
    if not shape.is_moe(layer):
        yield from ("mlp_gate", "mlp_up", "mlp_down")
    elif shape.shared_expert_width:
        yield from ("shared_gate", "shared_up", "shared_down", "shared_mix")


def _expert_tensors(shape: ModelShape, names: Container[str]) -> Iterator[tuple[str, str]]:
    """Name and role of every tensor that holds experts."""
    family = family_of(shape)
    for layer in shape.moe_layers:
        for expert in range(shape.num_experts):
            parts = family.expert_parts(shape, layer, expert, names)
            for role, part in zip(_EXPERT_ROLES[len(parts)], parts, strict=True):
                yield part.name, role
            if parts[0].index is not None:
                break  # stacked tensors hold all experts of the layer


_EXPERT_ROLES = MappingProxyType(
    {
        2: ("experts_gate_up", "experts_down"),
        3: ("expert_gate", "expert_up", "expert_down"),
    }
)

_LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "input_norm": "input_layernorm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        **{role: f"self_attn.{role}_proj.weight" for role in "qkvo"},
        **{f"{role}_bias": f"self_attn.{role}_proj.bias" for role in "qkvo"},
        **{f"{role}_norm": f"self_attn.{role}_norm.weight" for role in "qk"},
        **{f"mlp_{role}": f"mlp.{role}_proj.weight" for role in ("gate", "up", "down")},
        **{
            f"shared_{role}": f"mlp.shared_expert.{role}_proj.weight"
            for role in ("gate", "up", "down")
        },
        "shared_mix": "mlp.shared_expert_gate.weight",
    }
)

_QWEN_LIKE = Family(
    routers=(_LAYER + "mlp.gate.weight",),
    experts=(
        _LAYER + "mlp.experts.{expert}.gate_proj.weight",
        _LAYER + "mlp.experts.{expert}.up_proj.weight",
        _LAYER + "mlp.experts.{expert}.down_proj.weight",
    ),
)

_MIXTRAL = Family(
    routers=(_LAYER + "block_sparse_moe.gate.weight", _LAYER + "mlp.gate.weight"),
    experts=(
        _LAYER + "block_sparse_moe.experts.{expert}.w1.weight",
        _LAYER + "block_sparse_moe.experts.{expert}.w3.weight",
        _LAYER + "block_sparse_moe.experts.{expert}.w2.weight",
    ),
)

_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "MixtralForCausalLM": _MIXTRAL,
        "Qwen2MoeForCausalLM": _QWEN_LIKE,
        "Qwen3MoeForCausalLM": _QWEN_LIKE,
        "OlmoeForCausalLM": _QWEN_LIKE,
    }
)
