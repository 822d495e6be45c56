"""All schedules by name, those of the user's own files included."""

from collections.abc import Iterator, Mapping
from functools import cache

from moebatch.errors import ConfigError
from moebatch.quoting import shown
from moebatch.schedule.cgopipe import cgopipe, fastdecode
from moebatch.schedule.definition import NamedSchedule, Traits
from moebatch.schedule.flexgen import flexgen, flexgen_c
from moebatch.schedule.klotski import hot, klotski, multi, simple
from moebatch.schedule.own_file import OwnFile, is_own
from moebatch.schedule.pregated import ondemand, prefetch_all, pregated
from moebatch.schedule.promoe import promoe, promoe_base, promoe_preempt, promoe_prefetch
from moebatch.spec.files.suggestion import names_instead
from moebatch.spec.policy.policy import OpenPolicy, Policy

SCHEDULES: Mapping[str, NamedSchedule] = {
    one.name: one
    for one in (
        *(klotski, hot, multi, simple),
        *(cgopipe, fastdecode, flexgen, flexgen_c),
        *(pregated, ondemand, prefetch_all),
        *(promoe, promoe_preempt, promoe_prefetch, promoe_base),
    )
}

PLANNED = (cgopipe, klotski)
"""Those among which the planner's own search chooses, where a user names none."""
PRE_GATED = pregated
"""That for which pre-gates are made."""


@cache
def find_schedule(name: str) -> NamedSchedule:
    """The schedule of that name, or of a file: ``my_schedule.py:mine``.

    Raises ConfigError for a name that does not exist, and for a file that has no such schedule.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    if not is_own(name):
        instead = names_instead(name, SCHEDULES, besides="your own as file.py:name")
        message = f"no schedule is named {shown(name)}; {instead}"
        raise ConfigError.at("schedule", message, where=shown(name))
    return OwnFile(name).schedule()


def unknown_schedule(name: str) -> tuple[str, ...]:
    """What is wrong with the name of a schedule; nothing if there is one."""
    try:
        find_schedule(name)
    except ConfigError as error:
        return tuple(fault.message for fault in error.faults)
    return ()


def traits_of(policy: Policy | OpenPolicy) -> Traits:
    """What the schedule of a policy is like."""
    return find_schedule(policy.schedule).traits


def schedule_faults(policy: OpenPolicy) -> Iterator[tuple[str, str]]:
    """Field and message of all that a policy and its schedule contradict each other in."""
    name = policy.schedule
    unknown = unknown_schedule(name)
    if unknown:
        yield from (("schedule", message) for message in unknown)
        return
    traits = traits_of(policy)
    if policy.cache != "static" and traits.is_paged:
        yield "cache", f"must be static with schedule: {name}, which brings whole layers"
    if traits.attention is None or traits.moves != "block" or not policy.ffn_on_gpu:
        return  # without a GPU everything attends on the CPU
    wants_gpu = traits.attention == "gpu"
    if policy.attention_on_gpu != wants_gpu:
        there = "GPU" if policy.attention_on_gpu else "CPU"
        other = _other_attention(traits)
        yield (
            "schedule",
            f"{name} needs attention_on_gpu: {str(wants_gpu).lower()}; on the {there} it is "
            f"{other}",
        )


def _other_attention(traits: Traits) -> str:
    """The schedule that is like this one but for where it attends."""
    return next(
        one.name
        for one in SCHEDULES.values()
        if one.traits.moves == traits.moves and one.traits.attention != traits.attention
    )
