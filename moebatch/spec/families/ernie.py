"""ERNIE-4.5 MoE (Baidu), text alone."""

from moebatch.spec.families.family import FamilySpec, grouped_attention, usual_defaults
from moebatch.spec.model.blocks import Mlp, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.shape import Layers
from moebatch.spec.model.tensor_names import LAYER, USUAL_EXPERTS, TensorNames, usual_roles

_CORRECTION = "moe_statics.e_score_correction_bias"


def _layers(keys: ConfigKeys, num_layers: int) -> Layers:
    """Released files hold a layer more, which foretells tokens and is not computed."""
    bias = keys.flag("use_bias")
    width, num_shared = keys.count("moe_intermediate_size"), keys.count_or_zero("num_shared")
    return Layers(
        attention=grouped_attention(keys, biases="use_bias", rotates_neighbours=True),
        moe_layers=_moe_layers(keys, num_layers),
        expert=Mlp(width=width),
        dense=Mlp(width=keys.count("intermediate_size"), bias=bias),
        shared_expert=Mlp(width=num_shared * width, bias=bias) if num_shared else None,
        router=Router(
            has_correction=True,
            norm_order=1.0,
            least_norm=keys.positive("moe_norm_min"),
            has_exact_logits=True,
        ),
        head_bias=bias,
    )


def _moe_layers(keys: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    """Every ``moe_layer_interval``-th from ``moe_layer_start_index`` to ``moe_layer_end_index``, of
    which -1 is the last layer."""
    first, step = keys.count_or_zero("moe_layer_start_index"), keys.count("moe_layer_interval")
    is_open = keys.value("moe_layer_end_index") == -1
    last = num_layers - 1 if is_open else keys.count_or_zero("moe_layer_end_index")
    candidates = range(step - 1, num_layers, step)
    return tuple(layer for layer in candidates if first <= layer <= last)


ERNIE_4_5_MOE = FamilySpec(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    defaults=usual_defaults(
        vocab_size=103424,
        hidden_size=2560,
        intermediate_size=12288,
        num_hidden_layers=28,
        num_attention_heads=20,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        use_bias=False,
        moe_intermediate_size=1536,
        num_experts_per_tok=6,
        num_experts=64,
        num_shared=2,
        moe_layer_start_index=1,
        moe_layer_end_index=-1,
        moe_layer_interval=1,
        moe_norm_min=1e-12,
    ),
    spelling={
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
        "num_shared": "moe_num_shared_experts",
    },
    synonyms={key: (key,) for key in ("num_experts", "num_experts_per_tok")},
    layers=_layers,
    names=TensorNames(
        roles=usual_roles(shared="mlp.shared_experts")
        | {"router_correction": (f"{LAYER}mlp.{_CORRECTION}", f"{LAYER}mlp.gate.{_CORRECTION}")},
        ones={"router_correction": (1, 0)},
        experts=USUAL_EXPERTS,
    ),
)
