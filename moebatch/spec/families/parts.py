"""What layers of many families are made of: attention, routers, experts and MLPs."""

from collections.abc import Collection
from typing import Any

from moebatch.spec.model.blocks import ClampedGate, ExpertGroups, Mlp, Router
from moebatch.spec.model.config_keys import ConfigKeys
from moebatch.spec.model.grouped_attention import GroupedAttention


def grouped_attention(
    keys: ConfigKeys,
    *,
    biases: str | None = None,
    qkv_bias: str | None = None,
    rotates: bool = True,
    rotates_part: bool = False,
    fills_hidden: bool = False,
    **others: Any,
) -> GroupedAttention:
    """Attention with keys and values of their own; `biases` is the key that says whether all
    projections have one, `qkv_bias` whether all but the last have, `rotates` says whether there are
    rotary positions, `rotates_part` that a part of a head may rotate alone, as rotary parameters of
    its kind have it, and `fills_hidden` that heads together have to be as wide as hidden states.
    What else the attention of a family is like, it says in fields of `GroupedAttention`."""
    has_biases = biases is not None and keys.flag(biases)
    heads, kv_heads, head_dim = keys.heads(fill_hidden=fills_hidden)
    part = keys.rotary_dim(head_dim, others.get("rotary")) if rotates_part else None
    return GroupedAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=has_biases or (qkv_bias is not None and keys.flag(qkv_bias)),
        output_bias=has_biases,
        num_rotated=part if rotates else 0,
        **others,
    )


def norm_order(keys: ConfigKeys) -> float | None:
    """As `Router` has it: weights are made to sum to one where ``norm_topk_prob`` says so."""
    return 1.0 if keys.flag("norm_topk_prob") else None


def softmax_router(keys: ConfigKeys) -> Router:
    """A softmax over all experts, whose best may be made to sum to one."""
    return Router(norm_order=norm_order(keys))


def sigmoid_router(**others: Any) -> Router:
    """Sigmoids, corrected where experts are chosen, whose weights sum to one."""
    return Router(
        scores="sigmoid", has_correction=True, norm_order=1.0, has_exact_weights=True, **others
    )


def corrected_router(keys: ConfigKeys) -> Router:
    """DeepSeek-V3's: sigmoids, corrected where experts are chosen, those of the best groups alone.

    transformers adds 1e-20 to the sum of weights; here it is at least that, which is the same
    for all sums above 1e-13.
    """
    return Router(
        scores="sigmoid",
        groups=expert_groups(keys, num_scored=2),
        has_correction=True,
        norm_order=norm_order(keys),
        least_norm=1e-20,
        scale=keys.positive_or_none("routed_scaling_factor") or 1.0,
        has_exact_logits=True,
        has_exact_weights=True,
    )


def expert_groups(keys: ConfigKeys, *, num_scored: int) -> ExpertGroups | None:
    """``n_group`` groups of which ``topk_group`` are kept; None where that leaves all experts."""
    num_groups, num_kept = keys.count("n_group"), keys.count("topk_group")
    num_experts, num_chosen = keys.count("num_experts"), keys.experts_per_token()
    group_size, rest = divmod(num_experts, num_groups)
    if rest or group_size < num_scored:
        keys.wrong(
            "n_group",
            f"n_group ({num_groups}) must divide {num_experts} experts into groups of at least "
            f"{num_scored}",
        )
    elif not num_chosen <= num_kept * group_size <= num_experts:
        keys.wrong(
            "topk_group",
            f"topk_group ({num_kept}) of {num_groups} groups of {group_size} experts do not hold "
            f"the {num_chosen} experts of a token",
        )
    elif num_kept < num_groups:
        return ExpertGroups(num_groups, num_kept, num_scored)
    return None


def mlps(
    keys: ConfigKeys,
    num_layers: int,
    sparse: Collection[int] | None = None,
    *,
    width: str = "moe_intermediate_size",
    dense: str = "intermediate_size",
    shared: str | None = None,
    num_shared: str | None = None,
    biases: str | None = None,
) -> dict[str, Any]:
    """What `Layers` says of experts and MLPs: layers that are `sparse`, all if that is None, have
    experts as wide as the key `width` says, the others MLPs as wide as `dense` says. The shared
    expert, if there is one, is as wide as `shared` says, or as so many experts as `num_shared`
    says together; `biases` is the key that says whether it and MLPs have some."""
    sparse = range(num_layers) if sparse is None else sparse
    has_biases, of_experts = biases is not None and keys.flag(biases), keys.count(width)
    of_shared = keys.count(shared) if shared else 0
    if num_shared:
        of_shared = keys.count_or_zero(num_shared) * of_experts

    def mlp(width: int) -> Mlp | None:
        return Mlp(width=width, bias=has_biases) if width else None

    return {
        "moe_layers": tuple(sparse),
        "expert": Mlp(width=of_experts),
        "shared_expert": mlp(of_shared),
        "dense": mlp(keys.count(dense)) if len(sparse) < num_layers else None,
    }


def clamps_by_layer(keys: ConfigKeys, key: str, num_layers: int) -> tuple[ClampedGate | None, ...]:
    """What a list with a limit for each layer says; 0 and null are none."""
    limits = keys.value(key)
    if limits is None:
        return ()
    if not isinstance(limits, list) or len(limits) != num_layers:
        keys.fault(key, f"a list with a number for each of {num_layers} layers", limits)
        return ()
    return tuple(
        ClampedGate(limit=keys.positive_number(key, limit), clamps_activated=True)
        if limit is not None and limit != 0
        else None
        for limit in limits
    )
