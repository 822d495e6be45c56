"""What the configuration classes of transformers say that files leave out, and under which names
they read keys: ``python -m tests.spec.written`` writes it for all families."""

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from moebatch.spec.families import family
from moebatch.spec.families.registry import FAMILIES

FILE = Path(family.__file__).with_name("written.json")
_OF_OTHERS = re.compile(
    r".*(_token_id|_coef|pdrop|dropout|dropout_rate|sink_init)"
    r"|(initializer|mtp_loss|output_router|pretraining|rescale|use_associative|use_cache|use_mamba).*"
)
"""For what trains, which kernels compute, or what goes on from a token."""
_OF_ALL = {field.name for field in fields(PreTrainedConfig)} - {"tie_word_embeddings"}


def written() -> dict[str, dict[str, Any]]:
    """By ``model_type``, of those that transformers has a class for."""
    types = sorted({family.written_type for family in FAMILIES.values()})
    return {kind: _of_class(CONFIG_MAPPING[kind]) for kind in types if kind in CONFIG_MAPPING}


def _of_class(config_class: Any) -> dict[str, Any]:
    names = config_class.attribute_map
    found = {field.name: field.default for field in fields(config_class)}
    defaults = {
        name: default
        for name, default in sorted(found.items())
        if name not in _OF_ALL and not _OF_OTHERS.fullmatch(name)
        if default not in (MISSING, None, family.USUAL.get(name)) and names.get(name) not in found
    }
    rotary = getattr(config_class(), "rope_parameters", None) or {}
    if {"full_attention", "sliding_attention"} <= rotary.keys():  # which no class has as a default
        defaults["rope_parameters"] = rotary
    both = ("num_experts", "num_local_experts")  # which are in use for experts
    own = next((name for name in both if name in defaults), None)
    same = {name: own for name in both if own not in (None, name)}
    aliases = same | names
    said = {"defaults": defaults}
    return said if aliases == family.USUAL_ALIASES else said | {"aliases": aliases}


if __name__ == "__main__":
    FILE.write_text(json.dumps(written(), indent=1) + "\n")
