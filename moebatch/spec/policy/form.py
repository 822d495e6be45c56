"""What may stand in a policy file."""

from collections.abc import Iterator, Mapping
from math import ceil, isfinite
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ValidationInfo, field_validator

from moebatch.quoting import shown
from moebatch.spec.files.form import Built, Form, form_of
from moebatch.spec.files.limits import number
from moebatch.spec.files.place import Place
from moebatch.spec.files.values import Check, Line, WrongValues, one_line, real_number, whole_number
from moebatch.spec.policy.policy import MAX_SLOTS, UNDIVIDED, OpenPolicy, Placement
from moebatch.spec.workload import Workload

_SHARES_TOLERANCE = 1e-4
_MAX_REQUESTS = 10**12
_MAX_RATE = 1e12
_MEASURED = "tokens_per_s"
"""The figure of a record that predictions are compared with."""


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


def _placement(**shares: float) -> Placement:
    total = sum(shares.values())
    if abs(total - 1) > _SHARES_TOLERANCE:
        raise ValueError(f"shares must sum to 1, they sum to {total:.6g}")
    return Placement(**{level: share / total for level, share in shares.items()})


def _workload(*, prompt_tokens: float, new_tokens: float, requests: int | None = None) -> Workload:
    return Workload(
        num_sequences=requests,
        mean_prompt_tokens=prompt_tokens,
        mean_new_tokens=new_tokens,
        max_total_tokens=ceil(prompt_tokens + new_tokens),
    )


def _listed(value: object) -> object:
    if isinstance(value, list):
        return value
    raise ValueError(f"must be a list of numbers, one for each layer, got {shown(value)}")


def _record(value: object) -> dict[str, Any]:
    """Figures and texts by names, in mappings or lists."""
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a mapping of names to figures, got {shown(value)}")
    wrong = list(_not_plain((), value))
    if _MEASURED in value:
        try:
            _rate(value[_MEASURED])
        except ValueError as error:
            wrong.append(((_MEASURED,), str(error)))
    if wrong:
        raise WrongValues(wrong)
    return dict(value)


def _not_plain(place: Place, value: object) -> Iterator[tuple[Place, str]]:
    """Places and messages of what no program could use."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _not_plain((*place, key), item)
    elif isinstance(value, str):
        try:
            one_line(value)
        except ValueError as error:
            yield place, str(error)
    elif isinstance(value, float) and not isfinite(value):
        yield place, f"must be a figure or a text, got {shown(value)}"


def _rate(value: object) -> float:
    rate = number(value, 0, _MAX_RATE)
    if not rate:
        raise ValueError(f"must be above 0, got {shown(value)}")
    return rate


_Shares = Annotated[Placement, Built(form_of(Placement), _placement)]
_Sizes = Annotated[
    list[Annotated[int, whole_number(0, MAX_SLOTS)]],
    BeforeValidator(_listed),
    AfterValidator(tuple),
]
_POLICY = form_of(
    OpenPolicy,
    weights=_Shares,
    kv_cache=_Shares,
    cache_sizes=_Sizes,
    schedule=Annotated[str, Check(one_line)],
)
_Tokens = Annotated[float, real_number(1, 2**31)]
_Record = Annotated[Mapping[str, Any] | None, Check(_record)]


class _WorkloadForm(Form):
    prompt_tokens: _Tokens
    new_tokens: _Tokens
    requests: Annotated[int | None, whole_number(1, _MAX_REQUESTS)] = None


class PolicyForm(Form):
    """A policy file; None where a key is left out."""

    title: Line = None
    source: Line = None
    note: Line = None
    model: Line = None
    hardware: Line = None
    workload: Annotated[Workload | None, Built(_WorkloadForm, _workload)] = None
    policy: Annotated[OpenPolicy, Built(_POLICY, OpenPolicy)]
    published: _Record = None
    prediction: _Record = None

    @field_validator("policy")
    @classmethod
    def _agrees(cls, policy: OpenPolicy, info: ValidationInfo) -> OpenPolicy:
        assert info.context is not None, "a policy is read as a form"
        faults = [*_contradictions(policy), *info.context["rules"](policy)]
        if faults:
            raise WrongValues(((key,), message) for key, message in faults)
        return policy
