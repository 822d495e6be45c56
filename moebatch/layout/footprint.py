"""How many bytes weights and pages take, and how many a level holds at its peak."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moebatch.formats.weight_format import WeightFormat
from moebatch.spec.machine.hardware import Dtype, LevelName
from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.policy.policy import Policy

ACTIVATIONS_TERM = "activations"
FLOAT_BYTES = 4
ROOM_OF_TENSOR = 64
"""Weights begin at multiples of so many bytes."""
_BLOCK_BYTES = 4096
PACKED_ALIGNMENT = 256
"""The same of tensors of an expert on a GPU that do not follow one another."""
_TENSORS_PER_LAYER = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtypes:
    """How experts lie in their files, and what everything is computed in."""

    stored: WeightFormat
    """Where experts have several formats, the one that takes most bytes."""
    compute: Dtype
    mean_share: float = 1.0
    """Bytes of an expert in the mean, as a share of those of an expert in `stored`."""
    spared_bytes: int = 0
    """By how much the largest expert is smaller than one in `stored`: of a mix, some of the weights
    of each expert may have other formats."""
    extra_bias_bytes: int = 0
    """Of an expert's biases, where they take more than in the type that the model declares."""

    num_runs: int = 1
    """Of tensors of an expert that lie one behind the other where it is copied from."""

    @property
    def compute_bytes(self) -> int:
        """Bytes per number of weights outside experts, activations, keys and values."""
        return FLOAT_BYTES if self.compute == "float32" else 2

    @property
    def converts(self) -> bool:
        """Whether experts are computed in other numbers than they are stored in."""
        return not self.stored.is_computed_in(self.compute)

    def expert_bytes(self, shape: ModelShape) -> int:
        """Bytes of one expert in the mean, as it lies in its file."""
        num_bytes = shape.expert_bytes(self.stored) + self.extra_bias_bytes
        return round(self.mean_share * num_bytes)

    def largest_expert_bytes(self, shape: ModelShape) -> int:
        """The same of the largest."""
        return shape.expert_bytes(self.stored) + self.extra_bias_bytes - self.spared_bytes

    def num_expert_tensors(self, shape: ModelShape) -> int:
        """Most tensors in which an expert lies in its file."""
        of_weight = max(len(stored.parts("", (1, 1))) for stored, _ in self.stored.shares)
        of_matrix = of_weight + shape.expert.bias
        return len(shape.expert.roles) * of_matrix


class Buffer(NamedTuple):
    """A piece of memory, or several of one size."""

    name: str
    level: LevelName
    term: str
    """What a footprint counts it as."""
    num_elements: float
    element_bytes: int = 1
    num_pieces: float = 1

    @property
    def num_bytes(self) -> float:
        return self.num_elements * self.element_bytes * self.num_pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes at their peak, by what they are for."""

    terms: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """All terms together."""
        return sum(self.terms.values())

    @property
    def largest(self) -> tuple[str, int]:
        """The largest term: where a change would help most."""
        return max(self.terms.items(), key=lambda term: term[1])


def dense_bytes(shape: ModelShape, dtypes: Dtypes) -> int:
    """Weights outside experts, each tensor at an aligned place."""
    gaps = ROOM_OF_TENSOR * _TENSORS_PER_LAYER * shape.num_layers
    exact = shape.exact_params * (FLOAT_BYTES - dtypes.compute_bytes)
    return shape.resident_params * dtypes.compute_bytes + exact + gaps


def layer_bytes(shape: ModelShape, compute_bytes: int, layer: int) -> int:
    """Those of them that may come up with a layer, in whole blocks of a file."""
    num_bytes = shape.streamed_params[layer] * compute_bytes + ROOM_OF_TENSOR * _TENSORS_PER_LAYER
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def slot_bytes(shape: ModelShape, dtypes: Dtypes) -> int:
    """Room of one expert as stored: each tensor may begin and end within a block of the file."""
    return dtypes.largest_expert_bytes(shape) + dtypes.num_expert_tensors(shape) * 2 * _BLOCK_BYTES


def packed_bytes(shape: ModelShape, dtypes: Dtypes) -> int:
    """Room of one expert on a GPU, where tensors lie one after the other."""
    return dtypes.largest_expert_bytes(shape) + dtypes.num_expert_tensors(shape) * PACKED_ALIGNMENT


def window_pages(policy: Policy, group: CacheGroup, *, max_tokens: int) -> int:
    """Pages of the largest micro-batch in a group of layers, where no sequence is longer than
    `max_tokens`."""
    return min(policy.num_kv_pages, most_window_pages(policy, group, max_tokens=max_tokens))


def most_window_pages(policy: Policy, group: CacheGroup, *, max_tokens: int) -> int:
    """The same with as many pages of the cache as there may be."""
    of_micro_batch = policy.micro_batch_size * group.pages_of(max_tokens)
    return min(group.most_pages(policy.batch_size), of_micro_batch)


def page_bytes(group: CacheGroup, dtypes: Dtypes) -> int:
    """One page of the cache in one layer of a group."""
    return group.page_rows * group.layout.token_bytes(dtypes.compute_bytes)


def cache_bytes(
    groups: Sequence[CacheGroup], dtypes: Dtypes, policy: Policy, *, beyond: float = 0
) -> float:
    """All pages of the cache; or those that there would be no more if the policy had so many."""
    return sum(
        max(0, group.num_pages(policy) - beyond) * len(group.layers) * page_bytes(group, dtypes)
        for group in groups
    )
