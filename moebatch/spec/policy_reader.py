"""Reads a policy file from YAML, and collects all that is wrong with it."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from math import ceil, isfinite
from typing import Any, TypeVar, get_args

from moebatch.quoting import shown
from moebatch.spec.hardware import LEVELS
from moebatch.spec.limits import flag, number, whole
from moebatch.spec.open_policy import OpenPolicy
from moebatch.spec.policy import (
    PAGED,
    PREDICTORS,
    SCHEDULES,
    UNDIVIDED,
    Batching,
    CacheRule,
    Placement,
)
from moebatch.spec.workload import Workload
from moebatch.spec.yaml_file import Place, YamlFile, dotted
from moebatch.spec.yaml_reader import YamlReader

TEXTS = ("title", "source", "note", "model", "hardware")
RECORDS = ("published", "prediction")
MEASURED = "tokens_per_s"
"""The figure of a record that predictions are held against."""
SHARES_TOLERANCE = 1e-4
_FIELDS = tuple(field.name for field in fields(OpenPolicy))
_NEEDED = ("batch_size", "micro_batch_size", "weights")
_LENGTHS = ("prompt_tokens", "new_tokens")
_MAX_SEQUENCES = 2**20
_MAX_TOKENS = 2**24
_MAX_SLOTS = 2**16
_MAX_PAGES = 2**40
_MAX_REQUESTS = 10**12
_MAX_RATE = 1e12
_WHOLE: Mapping[str, tuple[int, int]] = {
    "batch_size": (1, _MAX_SEQUENCES),
    "micro_batch_size": (1, _MAX_SEQUENCES),
    "tokens_per_pass": (1, _MAX_TOKENS),
    "num_slots": (0, _MAX_SLOTS),
    "num_kv_pages": (1, _MAX_PAGES),
    "num_hot": (0, _MAX_SLOTS),
}
Choice = TypeVar("Choice", bound=str)


class PolicyReader(YamlReader):
    """Gives the parts of a policy file one by one."""

    def __init__(self, file: YamlFile) -> None:
        super().__init__(file)
        self._content = self._mapping((), file.content, (*TEXTS, "workload", "policy", *RECORDS))

    def text(self, key: str) -> str:
        """A text of the top level, in one line; empty where there is none."""
        return self._text((key,), self._content[key]) if key in self._content else ""

    def workload(self) -> Workload | None:
        """The workload that the policy was made for, if the file names one."""
        if "workload" not in self._content:
            return None
        allowed = (*_LENGTHS, "requests")
        entries = self._mapping(("workload",), self._content["workload"], allowed)
        if not isinstance(self._content["workload"], Mapping):
            return None
        for key in _LENGTHS:
            if key not in entries:
                self._fault(("workload", key), "is missing and has no default")
        lengths = [
            self._checked(("workload", key), entries[key], lambda value: number(value, 1, 2**31))
            for key in _LENGTHS
            if key in entries
        ]
        requests = None
        if "requests" in entries:
            requests = self._whole(("workload", "requests"), entries["requests"], 1, _MAX_REQUESTS)
        if len(lengths) < len(_LENGTHS) or lengths[0] is None or lengths[1] is None:
            return None
        return Workload(
            num_sequences=requests,
            mean_prompt_tokens=lengths[0],
            mean_new_tokens=lengths[1],
            max_total_tokens=ceil(lengths[0] + lengths[1]),
        )

    def policy(self) -> OpenPolicy | None:
        """The policy; None with at least one fault where there is none."""
        if "policy" not in self._content:
            self._fault(("policy",), f"is missing; add it with {', '.join(_NEEDED)}")
            return None
        entries = self._mapping(("policy",), self._content["policy"], _FIELDS)
        missing = [key for key in _NEEDED if key not in entries]
        if isinstance(self._content["policy"], Mapping):
            for key in missing:
                self._fault(("policy", key), "is missing and has no default")
        found = {key: self._field(key, value) for key, value in entries.items()}
        if missing or any(value is None for value in found.values()):
            return None
        policy = OpenPolicy(**found)
        for key, message in _contradictions(policy):
            self._fault(("policy", key), message)
        return policy

    def record(self, key: str) -> dict[str, Any]:
        """Figures by names: ``published`` or ``prediction``, empty where there are none."""
        if key not in self._content:
            return {}
        record = self._content[key]
        if not isinstance(record, Mapping):
            message = f"must be a mapping of names to figures, got {shown(record)}"
            self._fault((key,), message)
            return {}
        self._check_plain((key,), record)
        if MEASURED in record:
            self._checked((key, MEASURED), record[MEASURED], _rate)
        return dict(record)

    def _check_plain(self, place: Place, value: object) -> None:
        """Any figures and texts, in mappings or lists; nothing that no program could use."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self._check_plain((*place, key), item)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self._check_plain((*place, index), item)
        elif isinstance(value, str):
            self._text(place, value)
        elif isinstance(value, float) and not isfinite(value):
            self._fault(place, f"must be a figure or a text, got {shown(value)}")

    def _field(self, key: str, value: object) -> Any:
        place: Place = ("policy", key)
        if key in _WHOLE:
            return self._whole(place, value, *_WHOLE[key])
        if key in ("weights", "kv_cache"):
            return self._placement(place, value)
        if key == "schedule":
            return self._choice(place, value, SCHEDULES)
        if key == "batching":
            return self._choice(place, value, get_args(Batching))
        if key == "cache":
            return self._choice(place, value, get_args(CacheRule))
        if key == "predictor":
            return self._choice(place, value, PREDICTORS)
        if key == "cache_sizes":
            return self._sizes(place, value)
        return self._checked(place, value, flag)

    def _sizes(self, place: Place, value: object) -> tuple[int, ...] | None:
        if not isinstance(value, list):
            self._fault(place, f"must be a list of numbers, one for each layer, got {shown(value)}")
            return None
        sizes = [
            self._whole((*place, index), size, 0, _MAX_SLOTS) for index, size in enumerate(value)
        ]
        return tuple(size for size in sizes if size is not None)

    def _placement(self, place: Place, value: object) -> Placement | None:
        entries = self._mapping(place, value, LEVELS)
        if not isinstance(value, Mapping):
            return None
        shares = {
            level: self._checked((*place, level), share, lambda value: number(value, 0, 1))
            for level, share in entries.items()
        }
        known = {level: share for level, share in shares.items() if share is not None}
        total = sum(known.values())
        if len(known) < len(shares):
            return None
        if abs(total - 1) > SHARES_TOLERANCE:
            self._fault(place, f"shares must sum to 1, they sum to {total:.6g}")
            return None
        return Placement(**{level: share / total for level, share in known.items()})

    def _choice(self, place: Place, value: object, choices: tuple[Choice, ...]) -> Choice | None:
        found = next((choice for choice in choices if choice == value), None)
        if found is None:
            self._fault(place, f"must be one of {', '.join(choices)}, got {shown(value)}")
        return found

    def _whole(self, place: Place, value: object, least: int, most: int) -> int | None:
        return self._checked(place, value, lambda value: whole(value, least, most))

    def _unknown(self, place: Place, key: str, allowed: tuple[str, ...]) -> str:
        if not place and key in _FIELDS:
            return f"unknown key; did you mean {dotted(('policy', key))}?"
        return super()._unknown(place, key, allowed)


def _rate(value: object) -> float:
    rate = number(value, 0, _MAX_RATE)
    if not rate:
        raise ValueError(f"must be above 0, got {shown(value)}")
    return rate


def _contradictions(policy: OpenPolicy) -> Iterator[tuple[str, str]]:
    """Field and message of all that does not go together."""
    if policy.micro_batch_size > policy.batch_size:
        yield (
            "micro_batch_size",
            f"is {policy.micro_batch_size}, more than batch_size, which is {policy.batch_size}",
        )
    yield from _token_contradictions(policy)
    if policy.num_slots == 0 and policy.streams_experts:
        yield (
            "num_slots",
            "is 0, but some experts do not live where they are computed; leave it out, or put all "
            f"of weights on {'vram' if policy.ffn_on_gpu else 'dram'}",
        )
    if policy.weights.vram and not policy.ffn_on_gpu:
        yield "weights", "vram must be 0 where ffn_on_gpu is false: a CPU reads from dram"
    if policy.kv_cache.vram and not policy.attention_on_gpu:
        yield "kv_cache", "vram must be 0 where attention_on_gpu is false: a CPU reads from dram"
    if policy.cache_sizes and policy.cache in UNDIVIDED:
        yield (
            "cache_sizes",
            f"mean nothing with cache: {policy.cache}, which is not divided by hand",
        )
    if policy.cache != "static" and policy.schedule in PAGED:
        yield "cache", f"must be static with schedule: {policy.schedule}, which brings whole layers"
    if policy.schedule == "flexgen" and not policy.attention_on_gpu:
        yield "schedule", "flexgen needs attention_on_gpu: true; on the CPU it is flexgen_c"
    if policy.schedule == "flexgen_c" and policy.attention_on_gpu:
        yield "schedule", "flexgen_c needs attention_on_gpu: false; on the GPU it is flexgen"


def _token_contradictions(policy: OpenPolicy) -> Iterator[tuple[str, str]]:
    tokens = policy.tokens_per_pass
    if tokens is None:
        return
    if policy.batching == "static":
        yield (
            "tokens_per_pass",
            "means nothing with batching: static, where all prompts of a batch are one pass; "
            "leave it out",
        )
    elif tokens < policy.batch_size:
        yield (
            "tokens_per_pass",
            f"is {tokens}, too few for one token of each of the {policy.batch_size} sequences of "
            "batch_size; raise it or lower that",
        )
