"""What of a plan no run does, and what a policy asks for that a machine lacks."""

from collections.abc import Iterable, Iterator, Mapping

from moebatch.errors import ConfigError, Fault
from moebatch.plan.problem import Problem
from moebatch.quoting import shown
from moebatch.schedule.registry import find_schedule, traits_of
from moebatch.spec.machine.hardware import LEVELS
from moebatch.spec.model.cache_layout import LARGEST_SLICE
from moebatch.spec.policy.policy import Policy

_NOUNS: Mapping[str, str] = {"vram": "GPU"}


def not_runnable(
    problem: Problem, policy: Policy, *, is_plain: bool = False
) -> Iterator[tuple[str, str]]:
    """Keys of a policy, and what is wrong with them.

    Args:
        is_plain: everything is done one after the other, in main memory.
    """
    # A run reads a checkpoint wherever it is, whatever the profile says of disks.
    yield from (fault for fault in not_priced(problem, policy) if ".disk" not in fault[0])
    if policy.attends_beside_gpu and not problem.shape.attends_beside_gpu:
        yield "attention_on_gpu", f"{_on_gpu_alone(problem)}; set it to true"
    if policy.tokens_per_pass < problem.workload.fewest_pass_tokens:
        longest = problem.workload.fewest_pass_tokens
        yield (
            "tokens_per_pass",
            f"a prompt is encoded in one pass, and the longest sequence has {longest} tokens; set "
            "it to these at least, or leave it out",
        )
    if policy.kv_cache.disk:
        yield from _cache_on_disk(problem, is_plain=is_plain)
    if policy.batching != "mixed":
        advice = "static batches are for comparison: write mixed, and moebatch run --static"
        yield "batching", f"a run refills places as they come free; {advice}"
    yield from _without_slots(problem, policy)


def not_priced(problem: Problem, policy: Policy) -> Iterator[tuple[str, str]]:
    """Keys of a policy that ask for what no machine of this kind does, so that there is nothing to
    predict, and what is wrong with them."""
    yield from _missing_levels(problem, policy)
    yield from _streamed_layers(problem, policy)
    if problem.ladder.experts_at(policy) != problem.ladder.top:
        yield (
            "ffn_on_gpu",
            "experts are computed on the GPU where there is one; set it to true or take another "
            "policy",
        )
        return
    fault = problem.placed(policy).cache_fault
    if fault is not None:
        yield "cache_sizes", fault


def require_none(found: Iterable[tuple[str, str]], *, source: str) -> None:
    """Raises ConfigError, with `source`, if anything was found wrong with keys of a policy."""
    faults = [
        Fault(file=source, where=f"policy.{where}", message=message) for where, message in found
    ]
    if faults:
        raise ConfigError(faults)


def _without_slots(problem: Problem, policy: Policy) -> Iterator[tuple[str, str]]:
    top = problem.ladder.top
    if problem.ladder.experts_at(policy) != top or traits_of(policy).is_paged:
        return
    if policy.num_slots == 0 and policy.weights.on(top) < 1:
        where = "below the GPU" if top == "vram" else "on disk"
        yield "num_slots", f"experts {where} need slots to stream through"


def _streamed_layers(problem: Problem, policy: Policy) -> Iterator[tuple[str, str]]:
    count, most = policy.streamed_layers, problem.shape.num_layers
    if count > most:
        yield "streamed_layers", f"is {count}, the model has {most} layers"
    elif count and problem.shape.encoder is not None:
        yield (
            "streamed_layers",
            "passes leave out layers of an encoder, so all weights outside experts stay; set it to "
            "0",
        )


def require_schedule(problem: Problem) -> None:
    """Raises ConfigError if the problem is for a schedule that attends on the CPU beside a GPU,
    where the model does not: no policy of it can be run."""
    name = problem.schedule
    if name is None or not problem.with_vram or problem.shape.attends_beside_gpu:
        return
    if find_schedule(name).traits.attention == "cpu":
        message = f"attends on the CPU, but {_on_gpu_alone(problem)}; take another schedule"
        raise ConfigError.at("schedule", message, where=shown(name))


def _missing_levels(problem: Problem, policy: Policy) -> Iterator[tuple[str, str]]:
    """Keys of a policy that need a level which the machine lacks."""
    for name in ("attention_on_gpu", "ffn_on_gpu"):
        if getattr(policy, name) and problem.ladder.top != "vram":
            yield name, "there is no GPU; set it to false"
    for name in ("weights", "kv_cache"):
        for level in LEVELS:
            if getattr(policy, name).on(level) and level not in problem.hardware.levels:
                yield f"{name}.{level}", f"there is no {_NOUNS.get(level, level)}; set it to 0"


def only_planned(problem: Problem, policy: Policy) -> Iterator[str]:
    """What a plan has that no run does."""
    shape, tokens = problem.shape, problem.workload.max_total_tokens
    if tokens > shape.max_positions:
        yield f"{tokens} tokens do not fit into the model's context of {shape.max_positions}"
    encoded = problem.workload.mean_prompt_tokens - 1  # the answer begins with the last one
    if shape.encoder is not None and encoded > LARGEST_SLICE:
        yield f"prompts are encoded whole, at most {LARGEST_SLICE} tokens"
    yield from (f"{where}: {message}" for where, message in not_runnable(problem, policy))


def _on_gpu_alone(problem: Problem) -> str:
    which = "layers that keep entries of several tokens"
    if problem.shape.encoder is not None:
        which = "layers of an encoder and behind it"
    elif problem.shape.recurrence is not None:
        which = "recurrent layers"
    elif problem.shape.attention.most_chosen is not None:
        which = "layers whose tokens choose what they attend to"
    return f"{which} are computed on the GPU"


def _cache_on_disk(problem: Problem, *, is_plain: bool) -> Iterator[tuple[str, str]]:
    if is_plain:
        yield "kv_cache.disk", "--sync keeps keys and values in main memory; set it to 0"
    elif "dram->disk" not in problem.hardware.links:
        name = problem.hardware.name
        yield "kv_cache.disk", f"the profile {name} has no link dram->disk; set it to 0"
