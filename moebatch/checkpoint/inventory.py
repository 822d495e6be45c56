"""What the weights of a model folder are: how many of each kind, in which formats, by headers."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from moebatch.checkpoint.index import Weight
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.layout.placed import expert_keys

EXPERTS = "experts"
_KINDS = (
    *(EXPERTS, "shared experts", "layers without experts", "attention"),
    *("router", "latents of experts", "streams", "norms", "embeddings", "head"),
)


@dataclass(frozen=True, slots=True)
class KindOfWeights:
    kind: str
    num_numbers: int
    num_bytes: int
    """Scales and zero points included."""
    formats: Mapping[str, int]
    """How many matrices have each; where there are only vectors, how many of those."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "kind": self.kind,
            "numbers": self.num_numbers,
            "bytes": self.num_bytes,
            "formats": dict(self.formats),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """All weights of a model."""

    kinds: tuple[KindOfWeights, ...]
    claimed: str | None
    """The format of experts by ``config.json``; None where it says nothing of that."""
    is_as_claimed: bool
    unread: tuple[str, ...]
    """Tensors that belong to no weight of the model."""
    unread_bytes: int

    @classmethod
    def of(cls, files: ModelFiles) -> "Inventory":
        """By the headers that have been read."""
        by_kind: dict[str, list[Weight]] = {kind: [] for kind in _KINDS}
        for kind, weight in _weights(files):
            by_kind[kind].append(weight)
        kinds = tuple(_counted(kind, weights) for kind, weights in by_kind.items() if weights)
        checkpoint, claimed = files.checkpoint, str(files.shape.expert_format)
        used = {
            part.name
            for weight in chain.from_iterable(by_kind.values())
            for part in weight.format.parts(weight.name, weight.shape)
        }
        unread = tuple(sorted(checkpoint.tensors.keys() - used))
        return cls(
            kinds=kinds,
            claimed=None if checkpoint.is_gguf else claimed,
            is_as_claimed=claimed in kinds[0].formats,
            unread=unread,
            unread_bytes=sum(checkpoint.tensors[name].num_bytes for name in unread),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data, as `moebatch check --json` prints it."""
        return {
            "kinds": [kind.as_json() for kind in self.kinds],
            "claimed": self.claimed,
            "as_claimed": self.is_as_claimed,
            "unread": {"tensors": len(self.unread), "bytes": self.unread_bytes},
        }


def _counted(kind: str, weights: Sequence[Weight]) -> KindOfWeights:
    matrices = [weight for weight in weights if len(weight.shape) > 1]
    return KindOfWeights(
        kind,
        sum(prod(weight.shape) for weight in weights),
        sum(extent.num_bytes for weight in weights for extent in weight.extents),
        Counter(str(weight.format) for weight in matrices or weights),
    )


def _weights(files: ModelFiles) -> Iterator[tuple[str, Weight]]:
    """All of them, with their kinds."""
    for key in expert_keys(files.shape):
        yield from ((EXPERTS, weight) for weight in files.expert_weights(*key))
    yield from ((_kind_of(role), weight) for _, role, weight in files.weights_beside_experts())


def _kind_of(role: str) -> str:
    if role.removesuffix("_bias").endswith(("norm", "_share")) or "_norm_gate" in role:
        return "norms"
    if "_streams" in role:
        return "streams"
    by_beginning = {
        "shared": "shared experts",
        "mlp": "layers without experts",
        "router": "router",
        "latent": "latents of experts",
        "embedding": "embeddings",
        "head": "head",
    }
    return by_beginning.get(role.split("_")[0], "attention")
