"""What a user should know before the first pass, in plain lines."""

from collections.abc import Iterator
from dataclasses import fields

from moebatch.engine.approximation import Approximation
from moebatch.job.scan import InputSummary
from moebatch.plan.expert_choice import ExpertChoice
from moebatch.plan.prediction import Prediction
from moebatch.quoting import shown
from moebatch.rows.parse import parameter_like
from moebatch.rows.prompts import RowReader
from moebatch.schedule.registry import traits_of
from moebatch.spec.job import Job, OutputSection
from moebatch.spec.machine.hardware import DeviceKind, Hardware
from moebatch.spec.policy.policy import Policy
from moebatch.spec.sampling import Sampling
from moebatch.spec.workload import Workload
from moebatch.units import count_of, format_bytes, format_duration, format_number, format_rate

_LONGEST_VALUE = 60
_LEAST_SHARE = 0.01


def without_effect(
    job: Job, kind: DeviceKind, approximation: Approximation, policy: Policy
) -> Iterator[str]:
    """Budgets of levels that a run on such a device does not use; gates and a schedule that were
    made for each other, one without the other."""
    if job.resources.vram is not None and kind == "cpu":
        yield "resources.vram has no effect: this run computes on the CPU"
    follows = traits_of(policy).foresees == "pre-gate"
    if approximation.activation_level and not follows:
        yield (
            f"schedule {policy.schedule} does not prefetch what pre-gates choose; leave "
            "--schedule and --policy out, or set experts.gating to exact"
        )
    if not approximation.activation_level and follows:
        yield (
            f"schedule {policy.schedule} loads experts on demand: no gate chooses for a later "
            "layer; set experts.gating to pre-gated"
        )


def describe_emulation(hardware: Hardware) -> str:
    """The GPU that is only emulated, and what that means."""
    assert hardware.vram is not None, "there is a GPU"
    capacity, link = hardware.vram.capacity_bytes, hardware.links["dram->vram"]
    return (
        f"{hardware.name}: {format_bytes(capacity)} in main memory, its link paced at "
        f"{format_rate(link.bandwidth)}; the CPU computes everything"
    )


def describe_input(counted: InputSummary, output: OutputSection) -> str:
    """How many rows there are, where the bad ones go, and how long the others are."""
    rows = count_of(counted.num_rows, "row")
    if counted.num_bad_rows:
        rows += f" ({counted.num_bad_rows} bad, their errors go to {output.of_failed.name})"
    work = counted.workload
    if work is None:
        return rows
    prompts = f"prompts of {count_of(round(work.mean_prompt_tokens), 'token')}"
    return (
        f"{rows}: {prompts} and answers of up to "
        f"{work.mean_new_tokens:.0f} in the mean, at most {work.max_total_tokens} together"
        f"{_alike(counted, work)}"
    )


def seldom_meant(counted: InputSummary, reader: RowReader) -> Iterator[str]:
    """Prompts that a model for chats gets as they stand, and columns that are nearly parameters."""
    if counted.first_bare is not None and reader.tokenizer.has_chat_template:
        yield (
            f"{counted.first_bare.place} has a plain prompt, which the model gets unchanged, "
            "although it has a chat template; input.chat: true sends prompts through the template"
        )
    for name, row in counted.misspelt.items():
        guess = f"did you mean {parameter_like(name)}?"
        yield f"{row.place} has a column {shown(name)}, which is no parameter; {guess}"


def _alike(counted: InputSummary, work: Workload) -> str:
    """What need not be computed again."""
    found = ""
    if counted.num_repeated:
        found += f"; {count_of(counted.num_repeated, 'row repeats', 'rows repeat')} others"
    share = work.mean_shared_tokens / work.mean_prompt_tokens
    if share >= _LEAST_SHARE:
        found += f"; {share:.0%} of all prompt tokens begin like earlier ones"
    return found


def describe_prediction(expected: Prediction) -> str:
    """How long the passes should take, how fast, and what binds."""
    time = "" if expected.job_time_s is None else f"{format_duration(expected.job_time_s)}, "
    passes = ""
    if expected.num_passes is not None:
        passes = f"{count_of(round(expected.num_passes), 'pass', 'passes')}, "
    rate = f"{format_number(expected.tokens_per_s)} tok/s"
    return f"{time}{passes}{rate}, bound by {expected.binds}"


def describe_experts(choice: ExpertChoice) -> str:
    """Which predictor and cache were chosen, and what they gain."""
    chosen, policy = choice.chosen, choice.chosen.policy
    divided = ", divided among layers" * bool(policy.cache_sizes)
    gain = f", {choice.gain:.2f} x the simplest choice" if chosen is not choice.plainest else ""
    return (
        f"predictor {policy.predictor}, cache {policy.cache}{divided}: {chosen.ready:.0%} of "
        f"chosen experts should be ready in time{gain}"
    )


def describe_sampling(sampling: Sampling) -> str:
    """Parameters that are not at their defaults, and the two that users ask for most."""
    usual = Sampling()
    shown = {
        field.name: getattr(sampling, field.name)
        for field in fields(Sampling)
        if field.name in ("max_tokens", "temperature")
        or getattr(sampling, field.name) != getattr(usual, field.name)
    }
    return ", ".join(f"{name} {_cut(str(value))}" for name, value in shown.items())


def _cut(text: str) -> str:
    """Schemas may have pages."""
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"
