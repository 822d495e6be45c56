"""What layers are made of beside attention: MLPs, routers, norms.

Shape letters: D hidden.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

from moebatch.spec.model.attention import Sizes

_NORMS = frozenset(
    f"{name}_norm"
    for name in (
        *("input", "attention_out", "mlp", "shared", "experts_out", "shared_out", "mlp_out"),
        *("final", "latent", "each_expert", "q", "k", "index_q", "index_k"),
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    """Sizes of an expert, a shared expert, or the MLP of a layer without experts."""

    width: int
    roles: tuple[str, ...] = ("gate", "up", "down")
    """Its matrices: ``down`` is [D, width], the others are [width, D]. Without a gate the
    activation is that of ``up``."""
    bias: bool = False
    """Every matrix has one."""

    @property
    def is_gated(self) -> bool:
        """Whether what goes up is multiplied with what a gate lets through."""
        return "gate" in self.roles

    def matrices(self, hidden_size: int) -> Sizes:
        D, F = hidden_size, self.width
        return {role: (D, F) if role == "down" else (F, D) for role in self.roles}

    def tensors(self, hidden_size: int) -> Sizes:
        """Sizes of matrices and biases by role."""
        matrices = self.matrices(hidden_size)
        biases = {f"{role}_bias": size[:1] for role, size in matrices.items() if self.bias}
        return matrices | biases


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Groups of experts that follow each other, of which a token sees a few only (DeepSeek-V2,
    section 2.2.2)."""

    num_groups: int
    num_kept: int
    """Groups whose experts may be chosen: those with the highest scores."""
    num_scored: int
    """The score of a group is the sum of so many of its experts', the highest ones."""
    others_are_zero: bool = False
    """Experts of other groups are not ruled out, but chosen by zero: before those whose corrected
    scores are below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """How tokens choose experts: each by scores made of the logits of a gate."""

    scores: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = "softmax"
    """Over all experts, or each by itself; or one expert after the other, weighed by a softmax over
    those that are left and `near` (SparseMixer-v2 of GRIN MoE, Liu et al. 2024, at inference). In
    float32."""
    logit_scale: float = 1.0
    """By what logits are multiplied before all else: the gate's matrix is, when it is read."""
    logit_cap: float | None = None
    """Logits are brought between minus and plus this by its tanh before they become scores."""
    near: float = 0.0
    """Of the last: by how much a logit may be below the best one that is left, as a share of the
    larger of that and its own size."""
    groups: ExpertGroups | None = None
    bias: bool = False
    """The gate has one."""
    has_correction: bool = False
    """A learnt number per expert is added to its score where experts are chosen, and where groups
    are, but not where they are weighed (DeepSeek-V3, section 2.1.2)."""
    corrects_logits: bool = False
    """It is added to what scores are made of, and not to them (Kolibri-1)."""
    norm_order: float | None = None
    """The weights of a token's chosen experts, which are their scores, are divided by their norm of
    that order; 1 makes them sum to one. None leaves them alone."""
    least_norm: float = 0.0
    """What they are divided by is at least this."""
    added_to_norm: float = 0.0
    """It is more than their norm by this."""
    scale: float = 1.0
    """They are multiplied by this at last."""
    has_exact_logits: bool = False
    """The gate is computed in float32, whatever all else is computed in."""
    has_exact_weights: bool = False
    """Weights are not rounded to what all else is computed in."""
    has_own_norm: bool = False
    """The gate sees the hidden states through a norm of its own, divided by the root of their
    width, and not as the experts do."""
    weighs_inputs: bool = False
    """Weights are for what experts see, and not for what they make."""
    weighs_experts: bool = False
    """Weights are multiplied by a learnt number of their expert at last."""
    num_identities: int = 0
    """Choices behind the experts that give back what they see, weighed as these are: nothing of
    them is stored, moved or computed ("zero-computation experts" of LongCat-Flash)."""
    capacity: int | None = None
    """Tokens of a prompt that an expert takes, the first that choose it: the others pass the layer
    as they are (Fedus et al. 2022, section 2.2). None is all of them. A token that follows alone,
    as those of answers do, finds room in any expert."""

    @property
    def exact_roles(self) -> frozenset[str]:
        """Tensors that are held in float32."""
        gate = ("router", "router_bias") if self.has_exact_logits else ()
        return frozenset((*gate, "router_correction", "router_norm", "router_expert_weights"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """What hidden states go through before attention, before MLPs, and at last."""

    kind: Literal["rms", "layer"] = "rms"
    """Divided by their root mean square, or by their deviation from their mean, which is taken off
    (Ba et al. 2016)."""
    has_bias: bool = False
    """Of layer norms."""
    rounds_once: bool = False
    """The product with weights is rounded, and not what is multiplied: those of queries and keys
    too."""
    counts_from_one: bool = False
    """Stored weights are what is added to one, and `rounds_once` holds."""
    counts_last: bool = True
    """That goes for the last norm of a model, too."""

    def counts(self, role: str) -> bool:
        """Whether weights of that role are stored as what is added to one."""
        is_counted = role in _NORMS and (self.counts_last or role != "final_norm")
        return self.counts_from_one and is_counted

    @property
    def exact_roles(self) -> frozenset[str]:
        """Tensors that are held in float32."""
        return _NORMS if self.rounds_once or self.counts_from_one else frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class NormGates:
    """Some norms weigh what they have made of hidden states, each number by a gate that the whole
    of it opens: a sigmoid of what two matrices make of it, with SiLU between them (A.X-K2)."""

    rank: int
    """Numbers between the two."""
    roles: tuple[str, ...] = ("input_norm",)
    """Norms of all layers that do so."""
    moe_roles: tuple[str, ...] = ("mlp_norm",)
    """Those of layers with experts that do so beside these."""

    def tensors(self, role: str, hidden_size: int) -> Sizes:
        D, R = hidden_size, self.rank
        return {f"{role}_gate_down": (R, D), f"{role}_gate_up": (D, R)}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutNorms:
    """How norms of what experts and parts of layers have made differ from those before them: they
    are of what their weights have multiplied, and nothing is multiplied behind (Muse Spark)."""

    eps: float
    """What is added to mean squares."""
    unweighed: tuple[str, ...] = ()
    """Roles of those that have no weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixing:
    """Each number of hidden states has a learnt share, a sigmoid: what a part of a layer has made
    is multiplied by it, and hidden states by what makes squares of both sum to one (Muse Spark)."""

    temperature: float
    """What is learnt is divided by this before its sigmoid."""
    least: float = 1e-3
    """The square of what hidden states are multiplied by is at least this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """How what a part of a layer has made is added to hidden states."""

    kept: float = 1.0
    """By what these are multiplied before."""
    added: float = 1.0
    """By what the other is."""
    keeps_normed: bool = False
    """They are what the norm before that part has made of them, and not what it has seen: from
    there on, nothing else of them is left (MiniMax-Text-01)."""
    mixing: Mixing | None = None
    """What does so number by number, in place of all that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedGate:
    """SwiGLU of clamped numbers: ``(u + added) * g * sigmoid(alpha * g)`` where g is the gate, at
    most `limit`, and u what goes up, between minus and plus that (gpt-oss)."""

    limit: float
    alpha: float = 1.0
    added: float = 0.0
    clamps_activated: bool = False
    """What the activation makes of the gate is at most `limit`, and not the gate (Step-3.5)."""

    @property
    def most_gate(self) -> float:
        """What the gate is at most."""
        return inf if self.clamps_activated else self.limit

    @property
    def most_activated(self) -> float:
        """What its activation makes of it is at most."""
        return self.limit if self.clamps_activated else inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """Hidden states of a token are several; what a part of a layer sees is a mix of them, and what
    it makes is added to each, beside a mix of all (Xie et al. 2026)."""

    count: int
    num_balancings: int | None
    """Times that rows and columns of how they are mixed are made to sum to one. None is that it is
    added to each as it is: they are not mixed with each other (Hy4)."""
    eps: float
    magnitude: float = 2.0
    """Of what a part makes each stream takes a share below that."""
    least_share: float = 0.0
    """It is more by this."""
    averages_last: bool = False
    """What the last norm of a model sees is their mean: nothing is learnt of it."""

    def tensors(self, role: str, hidden_size: int, *, spreads: bool = True) -> Sizes:
        """Sizes of what is learnt of the mixing before the norm of that role; of the last one of a
        model nothing is spread."""
        if self.averages_last and not spreads:
            return {}
        count, wide = self.count, self.count * hidden_size
        num_scales = 1 + spreads * (1 if self.num_balancings is None else 2)
        num_mixed = count * (min(num_scales, 2) + count * (num_scales == 3))
        return {
            f"{role}_streams": (num_mixed, wide),
            f"{role}_streams_base": (num_mixed,),
            f"{role}_streams_scale": (num_scales,),
        }
