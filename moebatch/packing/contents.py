"""What a packed checkpoint holds: its files, and what its configuration says of them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from torch import Tensor

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.formats.weight_format import StoredPart
from moebatch.layout.placed import expert_keys
from moebatch.packing.encodings import Encoding
from moebatch.packing.shards import Shard
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.spec.families.registry import FAMILIES

_REST_BYTES = 4 * 2**30
"""Most bytes of a file of copied tensors, unless one is larger."""
_WEIGHT = ".weight"
_BESIDE_CODES = ("_shape", "_g_idx", "_zero_point", "_global_scale")
"""Ends of tensors beside a quantised weight that are not copied with it."""
_NO_EXPERTS = r"re:^(?!.*\bexperts\b)"
"""Modules that a program calls otherwise than files do, as transformers does the router of
Phi-3.5-MoE and the shared experts of Hy3, are left alone by this pattern."""


@dataclass(frozen=True)
class Contents:
    """Experts of a layer in a file of their own, matrix by matrix for each of them, which a single
    read brings; copies of everything else in files behind those."""

    files: ModelFiles
    encodings: Sequence[Encoding]
    """What experts are written as; the second one is for those in `wide`."""
    wide: frozenset[ExpertKey] = frozenset()

    def encoding_of(self, key: ExpertKey) -> Encoding:
        return self.encodings[key in self.wide]

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """All files, experts first."""
        parts = [(layer, self._expert_parts(layer)) for layer in self.files.shape.moe_layers]
        contents = [*parts, *((None, rest) for rest in self._rest())]
        total = len(contents)
        return tuple(
            Shard(f"model-{number:05d}-of-{total:05d}.safetensors", parts, layer)
            for number, (layer, parts) in enumerate(contents, start=1)
        )

    def matrices(self, key: ExpertKey) -> Iterator[tuple[str, str, tuple[int, int]]]:
        """Role, name and size of the matrices of an expert, in the order in which they lie."""
        sizes = self.files.shape.expert.matrices(self.files.shape.expert_size)
        for role, template in self._templates.items():
            rows, columns = sizes[role]
            name = template.format(**self.files.shape.place_of(key.layer), expert=key.expert)
            yield role, name, (rows, columns)

    def keys_of(self, layer: int) -> list[ExpertKey]:
        return [ExpertKey(layer, expert) for expert in range(self.files.shape.num_experts)]

    def constants(self, layer: int) -> Iterator[tuple[StoredPart, Tensor]]:
        """What stands behind the experts of a layer."""
        for key in self.keys_of(layer):
            for _, name, size in self.matrices(key):
                yield from self.encoding_of(key).constants(name, size).items()

    @property
    def num_experts(self) -> dict[str, int]:
        """By what they are written as."""
        return dict(Counter(self.encoding_of(key).name for key in self.experts))

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """Of all weights, before and after."""
        before = sum(each.num_bytes for each in self.files.checkpoint.tensors.values())
        return before, sum(part.num_bytes for shard in self.shards for part in shard.parts)

    @property
    def expert_bytes(self) -> tuple[int, int]:
        """Of all experts as they are stored, before and after."""
        after = sum(part.num_bytes for key in self.experts for part in self._parts(key))
        return self.files.expert_bytes, after

    @cached_property
    def config(self) -> dict[str, Any]:
        """The entries of config.json."""
        first, *others = self.encodings
        quantization: dict[str, Any]
        if first.name == "fp8":
            quantization = {**first.scheme, "modules_to_not_convert": self._modules_left_alone}
        else:
            groups = {
                f"group_{number}": {
                    "targets": self._targets(encoding) if others else ["Linear"],
                    "weights": dict(encoding.scheme),
                    "input_activations": None,
                    "output_activations": None,
                }
                for number, encoding in enumerate(self.encodings)
            }
            quantization = {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "quantization_status": "compressed",
                "config_groups": groups,
                "ignore": [*self._modules_left_alone, _NO_EXPERTS],
            }
        return {**self.files.config, "quantization_config": quantization}

    # --- inside ---------------------------------------------------------------------------------

    @property
    def experts(self) -> list[ExpertKey]:
        return expert_keys(self.files.shape)

    @cached_property
    def _templates(self) -> Mapping[str, str]:
        """Names of the matrices by role."""
        return FAMILIES[self.files.shape.architecture].names.apart

    def _parts(self, key: ExpertKey) -> Iterator[StoredPart]:
        encoding = self.encoding_of(key)
        for _, name, size in self.matrices(key):
            yield from encoding.parts(name, size)

    def _expert_parts(self, layer: int) -> list[StoredPart]:
        parts = [part for key in self.keys_of(layer) for part in self._parts(key)]
        return parts + [part for part, _ in self.constants(layer)]

    def _rest(self) -> Iterator[list[StoredPart]]:
        """Tensors that are copied, those of a file in the order of their bytes there."""
        tensors = self.files.checkpoint.tensors
        order = sorted(
            self._copied, key=lambda name: (str(tensors[name].path), tensors[name].offset)
        )
        group: list[StoredPart] = []
        num_bytes = 0
        for name in order:
            part = StoredPart(name, tensors[name].dtype, tensors[name].shape)
            if group and num_bytes + part.num_bytes > _REST_BYTES:
                yield group
                group, num_bytes = [], 0
            group.append(part)
            num_bytes += part.num_bytes
        if group:
            yield group

    @cached_property
    def _copied(self) -> list[str]:
        experts = self.files.experts
        stored = {part.name for key in self.experts for part in experts.parts(*key)}
        beside = {name.removesuffix(end) for name in stored for end in ("_packed", "")}
        ends = [f"{name}{end}" for name in beside for end in _BESIDE_CODES]
        return [name for name in self.files.checkpoint.tensors if name not in stored.union(ends)]

    @cached_property
    def _modules_left_alone(self) -> list[str]:
        """Modules with a matrix that is copied, and the head, which may be the embedding."""
        tensors = self.files.checkpoint.tensors
        names = [name for name in self._copied if len(tensors[name].shape) == 2]
        found = {name.removesuffix(_WEIGHT) for name in names if name.endswith(_WEIGHT)}
        return [*sorted(found - {"lm_head"}, key=_in_order), "lm_head"]

    def _targets(self, encoding: Encoding) -> list[str]:
        """Patterns of the experts' modules that have that encoding, one for each layer."""
        chosen = [key for key in self.experts if self.encoding_of(key) is encoding]
        found = []
        for layer, keys in groupby(chosen, key=lambda key: key.layer):
            experts = "|".join(str(key.expert) for key in keys)
            stems = sorted({self._stem(template, layer) for template in self._templates.values()})
            found += [f"re:{stem.replace('EXPERT', f'({experts})')}$" for stem in stems]
        return found

    def _stem(self, template: str, layer: int) -> str:
        place = self.files.shape.place_of(layer)
        return re.escape(template.format(**place, expert="EXPERT").removesuffix(_WEIGHT))


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split(".")]
