"""What the tensors of a family are called in its checkpoints, and how its experts lie in them.

Shape letters: E experts, D hidden, F expert width.
"""

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from moebatch.formats.weight_format import WeightFormat
from moebatch.spec.model.attention import Sizes
from moebatch.spec.model.shape import ModelShape

Named = dict[str, tuple[str, tuple[int, ...]]]
"""Name and size of weights, by role."""
InLayers = Mapping[str, str | Sequence[str]]
"""Name of a weight behind that of its layer, or several, by role."""
LAYER = "model.layers.{layer}."
IN_MODEL = {"model": "model.language_model"}
AROUND_MODEL = {"model": "language_model.model", "lm_head": "language_model.lm_head"}
"""How names begin in checkpoints that hold others beside a decoder: in those that transformers 5
writes, and in some that are released."""
_MATRICES = ("gate", "up", "down")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout:
    """How checkpoints hold experts."""

    weights: Mapping[str, tuple[str, ...]]
    """Names of the weights of an expert, with ``{expert}`` and what `ModelShape.place_of` says of
    its layer, and the roles of the matrices in each, as `Mlp.tensors` has them: one below the
    other, of equal height. Roles that a model has not are passed over."""
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The same of biases."""
    is_stacked: bool = False
    """Each weight holds all experts of a layer, one after the other: [E, ...]."""
    is_flat: bool = False
    """Stacks have no dimension of their own: [E x rows, columns]."""
    is_interleaved: bool = False
    """Matrices in one weight, and their biases, take turns row by row, instead of lying one below
    the other."""
    transposed: Collection[str] = ()
    """Roles of matrices whose columns are rows of the file."""
    formats: Collection[str] = ()
    """Names of the formats of weights that lie so; any if there are none."""

    def across(self, *roles: str) -> "ExpertLayout":
        """The same where columns of these matrices are rows of the file, which only weights do
        that are plain numbers."""
        return replace(self, transposed=roles, formats=("float32", "bfloat16", "float16"))

    def takes(self, stored: WeightFormat) -> bool:
        """Whether weights in a format may lie so."""
        return not self.formats or stored.name in self.formats


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """Names by role; a role may have several, the one of released checkpoints first."""

    roles: Mapping[str, tuple[str, ...]]
    """Templates with ``{layer}``, or more of `ModelShape.place_of`, where a layer owns the
    tensor."""
    experts: tuple[ExpertLayout, ...]
    """Layouts in use, that of released checkpoints first."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Roles of weights that hold those of other roles, one below the other, unless these lie apart
    under names that they have."""
    ones: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Roles of vectors that have in files so many dimensions of one before their own and behind it,
    but for GGUF."""
    turned: Collection[str] = ()
    """Roles of matrices whose rows are columns of the file, but for GGUF."""
    first_rows: Mapping[str, int] = field(default_factory=dict)
    """Roles of vectors that are the first of so many rows of a matrix in files."""
    may_lack_correction: bool = False
    """Checkpoints without what corrects the choice of experts are read; it is none, then."""
    in_gguf: Mapping[str, str] = field(default_factory=dict)
    """Names in GGUF that are not those of other families, behind that of the layer."""

    @property
    def apart(self) -> Mapping[str, str]:
        """Names of the matrices of an expert that each lie alone, by role; empty where the family
        has none."""
        for layout in self.experts:
            if not layout.is_stacked and all(len(roles) == 1 for roles in layout.weights.values()):
                return {roles[0]: template for template, roles in layout.weights.items()}
        return {}

    def found(self, shape: ModelShape, names: Container[str]) -> ModelShape:
        """The shape of a model whose checkpoint holds `names`, as far as these say more than its
        ``config.json``."""
        router, role = shape.router, "router_correction"
        if not self.may_lack_correction or not router.has_correction:
            return shape
        places = map(shape.place_of, shape.moe_layers)
        if any(self._name(role, names, place) in names for place in places):
            return shape
        return replace(shape, router=replace(router, has_correction=False))

    def global_weights(self, shape: ModelShape, names: Container[str]) -> Named:
        """Name and size by role of what no layer owns; `names` is what the checkpoint holds.

        A head that is tied but present all the same is used, since it may differ from the
        embedding, and transformers then uses it too.
        """
        sizes = shape.global_tensors()
        if self._name("head", names, {}) in names:
            sizes["head"] = sizes["embedding"]
        return self._named(sizes, names, {})

    def layer_weights(self, shape: ModelShape, layer: int, names: Container[str]) -> Named:
        """Name and size by role of everything in a layer but its experts."""
        return self._named(shape.layer_tensors(layer), names, shape.place_of(layer))

    def _named(self, sizes: Sizes, names: Container[str], place: Mapping[str, object]) -> Named:
        sizes = dict(sizes)
        is_own = not _is_gguf(names)
        for whole, parts in self.joined.items():
            if parts[0] in sizes and self._is_whole(whole, parts[0], names, place):
                of_parts = [sizes.pop(part) for part in parts]
                height = sum(size[0] for size in of_parts)
                sizes[whole] = (height, *of_parts[0][1:])
        for role in sizes.keys() & self.ones.keys() if is_own else ():
            before, behind = self.ones[role]
            sizes[role] = (*(1,) * before, *sizes[role], *(1,) * behind)
        for role in sizes.keys() & self.first_rows.keys():
            sizes[role] = (self.first_rows[role], *sizes[role])
        for role in sizes.keys() & {*self.turned} if is_own else ():
            sizes[role] = sizes[role][::-1]
        return {role: (self._name(role, names, place), size) for role, size in sizes.items()}

    def _is_whole(
        self, whole: str, part: str, names: Container[str], place: Mapping[str, object]
    ) -> bool:
        """Whether weights lie joined, of which that is the first."""
        if _is_gguf(names):
            return whole in _GGUF_ROLES and self._lies_there(whole, names, place)
        return not self._lies_there(part, names, place)

    def _lies_there(self, role: str, names: Container[str], place: Mapping[str, object]) -> bool:
        """Whether a weight lies under a name of its own."""
        return role in self.roles and _is_there(self._name(role, names, place), names)

    def with_names(self, own: InLayers, **changes: Any) -> "TensorNames":
        """The same with other names in layers, and changes to other fields."""
        return replace(self, roles={**self.roles, **_in_layers(own)}, **changes)

    def also_under(self, beginnings: Mapping[str, str]) -> "TensorNames":
        """The same names, and first of all those that begin otherwise, up to their first dot, as
        checkpoints have them that hold other models beside the decoder."""

        def both(name: str) -> tuple[str, ...]:
            first, _, rest = name.partition(".")
            return (f"{beginnings[first]}.{rest}", name) if first in beginnings else (name,)

        under = tuple(
            replace(
                layout,
                weights={both(name)[0]: roles for name, roles in layout.weights.items()},
            )
            for layout in self.experts
        )
        roles = {
            role: tuple(each for name in names for each in both(name))
            for role, names in self.roles.items()
        }
        return replace(self, roles=roles, experts=(*under, *self.experts))

    def expert_layouts(self, names: Container[str]) -> tuple[ExpertLayout, ...]:
        """The ways in which experts may lie in a checkpoint that holds `names`."""
        return _GGUF_EXPERTS if _is_gguf(names) else self.experts

    def _name(self, role: str, names: Container[str], place: Mapping[str, object]) -> str:
        if not _is_gguf(names):
            templates = self.roles[role]
        elif role in self.in_gguf:
            templates = (_in_gguf_layer(role, self.in_gguf[role]),)
        else:
            templates = _GGUF_ROLES[role]
        candidates = [template.format(**place) for template in templates]
        return next((name for name in candidates if _is_there(name, names)), candidates[0])


def _is_there(name: str, names: Container[str]) -> bool:
    """Whether a weight is, as it is or as formats of codes have it."""
    stem = name.removesuffix(".weight")
    ways = (name, f"{name}_packed", f"{name}_blocks", f"{stem}.qweight")
    return any(each in names for each in ways)


def separate_experts(prefix: str, *, gate: str, up: str, down: str) -> ExpertLayout:
    """Three matrices for each expert, as released checkpoints have them: names behind `prefix`,
    which ends with the number of the expert."""
    names = {"gate": gate, "up": up, "down": down}
    return ExpertLayout(
        weights={f"{LAYER}{prefix}.{name}.weight": (role,) for role, name in names.items()}
    )


def stacked_experts(
    prefix: str, *, gate_up: str = "gate_up_proj", down: str = "down_proj"
) -> ExpertLayout:
    """All experts of a layer in two tensors, [E, 2F, D] and [E, D, F], as transformers 5 holds
    them: names behind `prefix`."""
    weights = {f"{LAYER}{prefix}{gate_up}": ("gate", "up"), f"{LAYER}{prefix}{down}": ("down",)}
    return ExpertLayout(weights=weights, is_stacked=True)


OF_MAMBA = {
    "recurrent_in": "in_proj.weight",
    "recurrent_in_bias": "in_proj.bias",
    "recurrent_conv": "conv1d.weight",
    "recurrent_conv_bias": "conv1d.bias",
    "recurrent_decay": "A_log",
    "recurrent_step": "dt_bias",
    "recurrent_skip": "D",
    "recurrent_norm": "norm.weight",
    "recurrent_out": "out_proj.weight",
    "recurrent_out_bias": "out_proj.bias",
}
"""Names of the weights of Mamba-2, behind that of the part of a layer that it is."""
STACKED_EXPERTS = stacked_experts("mlp.experts.")


def projected_experts(mlp: str) -> tuple[ExpertLayout, ExpertLayout]:
    """Experts in a part of that name, in the layouts of most families."""
    apart = separate_experts(
        f"{mlp}.experts.{{expert}}", gate="gate_proj", up="up_proj", down="down_proj"
    )
    return apart, stacked_experts(f"{mlp}.experts.")


USUAL_EXPERTS = projected_experts("mlp")
BLOCK_EXPERTS = (
    separate_experts("block_sparse_moe.experts.{expert}", gate="w1", up="w3", down="w2"),
    STACKED_EXPERTS,
)
"""Those of Mixtral, and of families that are named after it."""


OF_LATENTS = {
    "q_a": "q_a_proj.weight",
    "q_a_bias": "q_a_proj.bias",
    "q_a_norm": "q_a_layernorm.weight",
    "q_b": "q_b_proj.weight",
    "kv_a": "kv_a_proj_with_mqa.weight",
    "kv_a_bias": "kv_a_proj_with_mqa.bias",
    "kv_a_norm": "kv_a_layernorm.weight",
    "kv_b": "kv_b_proj.weight",
    "index_q": "indexer.wq_b.weight",
    "index_k": "indexer.wk.weight",
    "index_k_norm": "indexer.k_norm.weight",
    "index_k_norm_bias": "indexer.k_norm.bias",
    "index_weights": "indexer.weights_proj.weight",
}
"""Names of what makes latents, of what is made of them, and of what chooses among tokens, behind
that of attention."""


def behind(part: str, names: Mapping[str, str]) -> dict[str, str]:
    """Names of weights by role, behind that of a part of a layer."""
    return {role: part + name for role, name in names.items()}


def usual_names(
    own: InLayers = MappingProxyType({}),
    *,
    mlp: Sequence[str] = ("mlp",),
    shared: Sequence[str] = ("mlp.shared_expert",),
    others: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    experts: tuple[ExpertLayout, ...] = USUAL_EXPERTS,
    **further: Any,
) -> TensorNames:
    """Names that most families use, but for the family's `own` ones, in layers, and `others`;
    `mlp` and `shared` are what it calls MLPs and the shared expert, and `further` fields of
    `TensorNames`."""
    layer: InLayers = {
        "input_norm": "input_layernorm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "input_norm_bias": "input_layernorm.bias",
        "mlp_norm_bias": "post_attention_layernorm.bias",
        **{role: f"self_attn.{role}_proj.weight" for role in "qkvo"},
        **{f"{role}_bias": f"self_attn.{role}_proj.bias" for role in "qkvo"},
        **{f"{role}_norm": f"self_attn.{role}_norm.weight" for role in "qk"},
        **behind("self_attn.", OF_LATENTS),
        "sink_scores": "self_attn.sinks",
        "router": "mlp.gate.weight",
        "router_correction": "mlp.gate.e_score_correction_bias",
        **_mlp_roles("mlp", mlp),
        **_mlp_roles("shared", shared),
        "shared_mix": [f"{name}_gate.weight" for name in shared],
        **own,
    }
    roles = {
        "embedding": ("model.embed_tokens.weight",),
        "final_norm": ("model.norm.weight",),
        "final_norm_bias": ("model.norm.bias",),
        "head": ("lm_head.weight",),
        "head_bias": ("lm_head.bias",),
        **_in_layers(layer),
        **others,
    }
    return TensorNames(roles=roles, experts=experts, **further)


def _mlp_roles(prefix: str, names: Sequence[str]) -> InLayers:
    kinds = {"": "weight", "_bias": "bias"}
    return {
        f"{prefix}_{role}{end}": [f"{name}.{role}_proj.{kind}" for name in names]
        for role in _MATRICES
        for end, kind in kinds.items()
    }


def _in_layers(names: InLayers) -> dict[str, tuple[str, ...]]:
    return {
        role: tuple(LAYER + name for name in ([each] if isinstance(each, str) else each))
        for role, each in names.items()
    }


_GGUF_EMBEDDING = "token_embd.weight"
_GGUF_LAYER, _GGUF_MLP = "blk.{layer}.", "blk.{mlp}."
_IN_GGUF_LAYERS = {
    "input_norm": ("attn_norm.weight",),
    "input_norm_bias": ("attn_norm.bias",),
    "mlp_norm": ("ffn_norm.weight", "post_attention_norm.weight"),
    "mlp_norm_bias": ("ffn_norm.bias",),
    **{role: (f"attn_{role}.weight",) for role in "qkv"},
    "qkv": ("attn_qkv.weight",),
    "gated_q": ("attn_q.weight",),
    "o": ("attn_output.weight",),
    **{f"{role}_bias": (f"attn_{role}.bias",) for role in "qkv"},
    "o_bias": ("attn_output.bias",),
    **{f"{role}_norm": (f"attn_{role}_norm.weight",) for role in ("q", "k", "q_a", "kv_a")},
    "q_a": ("attn_q_a.weight",),
    "q_b": ("attn_q_b.weight",),
    "kv_a": ("attn_kv_a_mqa.weight",),
    "kv_b": ("attn_kv_b.weight",),
    "sink_scores": ("attn_sinks.weight",),
    "router": ("ffn_gate_inp.weight",),
    "router_bias": ("ffn_gate_inp.bias",),
    "router_correction": ("exp_probs_b.bias",),
    **{f"mlp_{role}": (f"ffn_{role}.weight",) for role in _MATRICES},
    **{f"shared_{role}": (f"ffn_{role}_shexp.weight",) for role in _MATRICES},
    "shared_mix": ("ffn_gate_inp_shexp.weight",),
    "delta_qkvz": ("ssm_in.weight",),
    "delta_qkv": ("attn_qkv.weight",),
    "delta_z": ("attn_gate.weight",),
    "delta_ba": ("ssm_ba.weight",),
    "delta_b": ("ssm_beta.weight",),
    "delta_a": ("ssm_alpha.weight",),
    "recurrent_in": ("ssm_in.weight",),
    "recurrent_conv": ("ssm_conv1d.weight",),
    "recurrent_conv_bias": ("ssm_conv1d.bias",),
    "recurrent_decay": ("ssm_a",),
    "recurrent_step": ("ssm_dt.bias",),
    "recurrent_skip": ("ssm_d",),
    "recurrent_norm": ("ssm_norm.weight",),
    "recurrent_out": ("ssm_out.weight",),
}


def _in_gguf_layer(role: str, name: str) -> str:
    is_of_mlp = role.startswith(("mlp_", "router", "shared_", "latent_"))
    return f"{_GGUF_MLP if is_of_mlp else _GGUF_LAYER}{name}"


_GGUF_ROLES = {
    "embedding": (_GGUF_EMBEDDING,),
    "final_norm": ("output_norm.weight", "token_embd_norm.weight"),
    "final_norm_bias": ("output_norm.bias",),
    "head": ("output.weight",),
    "head_bias": ("output.bias",),
    **{
        role: tuple(_in_gguf_layer(role, name) for name in names)
        for role, names in _IN_GGUF_LAYERS.items()
    },
}
"""Names in GGUF files, which most families share."""


def _gguf_experts(end: str, *, is_stacked: bool, **joined: tuple[str, ...]) -> ExpertLayout:
    """Matrices, and their biases, by what stands for them in names; `joined` are several."""
    roles = joined or {role: (role,) for role in ("gate", "up")}
    named = {
        f"{_GGUF_MLP}ffn_{name}{end}": each for name, each in {**roles, "down": ("down",)}.items()
    }
    return ExpertLayout(
        weights={f"{name}.weight": each for name, each in named.items()},
        biases={
            f"{name}.bias": tuple(f"{role}_bias" for role in each) for name, each in named.items()
        },
        is_stacked=is_stacked,
    )


_GGUF_EXPERTS = (
    _gguf_experts("_exps", is_stacked=True),
    _gguf_experts("_exps", is_stacked=True, gate_up=("gate", "up")),
    _gguf_experts(".{expert}", is_stacked=False),
)
"""Three tensors for all experts of a layer, or two; or three for each expert, as in the first files
of Mixtral."""


def _is_gguf(names: Container[str]) -> bool:
    return _GGUF_EMBEDDING in names
