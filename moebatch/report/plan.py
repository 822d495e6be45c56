"""A planner's answer as a person reads it."""

from collections.abc import Iterator
from itertools import chain

from rich.console import Group, RenderableType
from rich.text import Text

from moebatch.plan.answer import Answer
from moebatch.plan.expert_choice import WORTH_CHANGING, Alternative, ExpertChoice
from moebatch.plan.prediction import Prediction
from moebatch.plan.roofs import PolicyRoofs, policy_roofs
from moebatch.report.console import plain, whole
from moebatch.report.tables import (
    NAME_WIDTH,
    NamedRows,
    ShareBar,
    named_bars,
    notes_view,
    titled_columns,
)
from moebatch.schedule.lanes import DEVICES
from moebatch.spec.machine.hardware import LEVELS
from moebatch.spec.policy.policy import Placement, Policy, shares_text
from moebatch.spec.workload import Workload
from moebatch.units import count_of, format_bytes, format_duration, format_number

_METHODS = {
    "milp": "MILP",
    "klotski": "Klotski's inequalities",
    "paper": "MoE-Lightning's own forms",
    "given": "as given",
}
_ENDLESS = 1e9
_MOST_EXPERT_CHOICES = 6


def plan_views(answer: Answer) -> Iterator[RenderableType]:
    """First the plan, which is there at once; then what would help, which is worked out only then,
    and notes."""
    yield _plan(answer)
    if answer.improvements:
        advice = NamedRows(_advice(answer), min_width=NAME_WIDTH)
        yield Group("", Text("what would help most", style="bold"), advice)
    yield Group("", *notes_view(answer.notes))


def _plan(answer: Answer) -> RenderableType:
    """Policy, speed, memory, lanes and turning points."""
    policy = NamedRows(_policy(answer), min_width=NAME_WIDTH)
    speed = NamedRows(_speed(answer), min_width=NAME_WIDTH)
    parts: list[RenderableType] = [_title(answer), "", policy, "", speed]
    if answer.only_planned:
        reasons = "; ".join(answer.only_planned)
        parts.insert(0, Text(f"a plan only: {reasons}", style="yellow"))
    parts += ["", _memory(answer.prediction), "", _lanes(answer.prediction)]
    if answer.experts is not None:
        parts += ["", _experts(answer.experts)]
    roofs = policy_roofs(answer.problem, answer.policy)
    if roofs:
        turning = NamedRows(chain(*map(_turning, roofs)), min_width=NAME_WIDTH)
        parts += ["", Text("turning points of the experts", style="bold"), turning]
    return Group(*parts)


def _title(answer: Answer) -> RenderableType:
    hardware = answer.problem.hardware
    machine = f"{hardware.name}: {hardware.title}" if hardware.title else hardware.name
    return Group(
        Text.from_markup(f"[bold]{plain(answer.model)}[/] on [bold]{plain(machine)}[/]"),
        Text(_workload(answer.problem.workload), style="dim"),
    )


def _workload(workload: Workload) -> str:
    lengths = (
        f"prompts of {count_of(round(workload.mean_prompt_tokens), 'token')}, answers of up to "
        f"{workload.mean_new_tokens:.0f}, longest together {workload.max_total_tokens}"
    )
    if workload.num_sequences is None:
        return f"{lengths}; as many as there are (give --requests for a job time)"
    return f"{count_of(workload.num_sequences, 'sequence')}: {lengths}"


def _policy(answer: Answer) -> Iterator[tuple[str, str]]:
    policy = answer.policy
    yield "policy", f"[dim]{_METHODS[answer.method]} ({plain(answer.solver)})[/]"
    tokens = ""
    if policy.batching == "mixed":
        tokens = f", up to {count_of(policy.tokens_per_pass, 'token')} a pass"
    parts = count_of(policy.num_micro_batches, "micro-batch", "micro-batches")
    batch = f"[bold]{count_of(policy.batch_size, 'sequence')}[/] in {parts}"
    yield "batch", f"{batch} of [bold]{policy.micro_batch_size}[/]{tokens}"
    yield "computed", _places(policy, with_gpu=answer.problem.with_vram)
    problem = answer.problem
    placed = _placed(policy.weights, problem.num_experts)
    yield "experts", f"{placed}, stored as {problem.dtypes.stored}"
    if policy.streamed_layers:
        below = problem.ladder.below(problem.ladder.top)
        layers = f"{policy.streamed_layers} of {count_of(problem.shape.num_layers, 'layer')}"
        yield "other weights", f"those of {layers} come from {below} in each pass"
    cached_in = problem.shape.attention.cache_dtype
    numbers = f" of {cached_in}" if cached_in else ""
    pages = count_of(policy.num_kv_pages, "page")
    yield "KV cache", f"{shares_text(policy.kv_cache)} ({pages}{numbers})"
    recurrence = problem.shape.recurrence
    if recurrence is not None and recurrence.state_dtype == "float16":
        yield "states", f"kept in {recurrence.state_dtype}"
    sink_window = problem.shape.attention.sink_window
    if sink_window is not None:
        yield "attention", f"{sink_window}; at most {sink_window.most_cached} tokens are cached"
    for group in problem.memory.groups:
        if not group.is_whole and group.sink_window != sink_window:
            layers = count_of(len(group.layers), "layer keeps", "layers keep")
            yield "bounded", f"{layers} {group}, and share no beginnings"
    slots = count_of(policy.num_slots, "slot")
    yield "schedule", f"{policy.schedule}, {slots}, {policy.batching} batches"


def _places(policy: Policy, *, with_gpu: bool) -> str:
    if not with_gpu:
        return "all on the CPU"
    attention = "GPU" if policy.attention_on_gpu else "CPU"
    experts = "GPU" if policy.ffn_on_gpu else "CPU"
    return f"attention on the {attention}, experts on the {experts}"


def _placed(weights: Placement, num_experts: int) -> str:
    counts = [
        f"{format_number(weights.on(level) * num_experts)} on {level}"
        for level in LEVELS
        if weights.on(level) > 0
    ]
    return f"{shares_text(weights)} ({', '.join(counts)} of {num_experts:,})"


def _speed(answer: Answer) -> Iterator[tuple[str, str]]:
    prediction, workload = answer.prediction, answer.problem.workload
    prompts = prediction.tokens_per_s * workload.mean_prompt_tokens / workload.mean_new_tokens
    job = f"[bold green]{format_number(prediction.tokens_per_s)}[/] generated"
    job += f" and {format_number(prompts)} prompt tok/s"
    if prediction.job_time_s is not None:
        job += f", [bold]{format_duration(prediction.job_time_s)}[/] in all"
    if prediction.num_passes is not None:
        job += f", {count_of(round(prediction.num_passes), 'pass', 'passes')}"
    yield "job", job
    decode = format_number(prediction.decode_tokens_per_s)
    prefill = format_number(prediction.prefill_tokens_per_s)
    yield "", f"[dim]decoding alone {decode} tok/s, prompts alone {prefill} tok/s[/]"


def _memory(prediction: Prediction) -> RenderableType:
    grid = named_bars()
    for level, capacity in prediction.capacity_bytes.items():
        peak = prediction.peak_bytes[level]
        if not peak:
            continue
        share = peak / capacity
        used = f"{format_bytes(peak)} of {format_bytes(capacity)}"
        grid.add_row(f"{level}", ShareBar(share), used)
    return grid


def _lanes(prediction: Prediction) -> RenderableType:
    grid = named_bars()
    grid.add_row("per layer", "", f"[bold]{format_duration(prediction.layer_time_s)}[/]")
    for lane, seconds in sorted(prediction.lanes_s.items(), key=lambda pair: -pair[1]):
        binds = DEVICES[lane] == DEVICES[prediction.bottleneck]
        name = f"[bold yellow]{lane}[/]" if binds else lane
        share = seconds / prediction.layer_time_s if prediction.layer_time_s else 0.0
        note = f" [bold yellow]{_how_it_binds(prediction)}[/]" if binds else ""
        if binds and prediction.launching_s:
            waiting = format_duration(prediction.launching_s)
            note += f", {waiting} of it the host"
        grid.add_row(name, ShareBar(share), f"{format_duration(seconds)}{note}")
    return grid


def _how_it_binds(prediction: Prediction) -> str:
    if prediction.lanes_wait:
        return f"busiest; lanes wait for each other for {format_duration(prediction.waiting_s)}"
    return "binds" if prediction.has_busy_lane else "busiest; others bind in other passes"


def _experts(choice: ExpertChoice) -> RenderableType:
    """The alternatives side by side, the one that was chosen marked, and why."""
    titles = "predictor", "cache", "ready", "loads a pass", "job", ""
    table = titled_columns(*titles, left=titles[:2])
    for one in _shown_experts(choice):
        is_chosen = one is choice.chosen
        speedup = choice.plainest.seconds / one.seconds
        table.add_row(
            one.policy.predictor or "correlation",
            one.policy.cache + (", divided" if one.policy.cache_sizes else ""),
            f"{one.ready:.0%}",
            f"{one.num_loads:.1f}",
            format_duration(one.seconds),
            f"{speedup:.2f}x" + (" [bold green]chosen[/]" if is_chosen else ""),
            style="bold" if is_chosen else "dim",
        )
    return Group(Text("experts", style="bold"), table, Text(_why(choice), style="dim"))


def _why(choice: ExpertChoice) -> str:
    chosen, plainest = choice.chosen, choice.plainest
    steps = f"{choice.depth} layer{'s' if choice.depth > 1 else ''} ahead"
    if chosen is plainest:
        gain = f"{WORTH_CHANGING - 1:.0%}"
        return f"nothing else gains {gain}; experts are prefetched up to {steps}"
    ready = f"{chosen.ready:.0%} of the experts that gates ask for are ready by then"
    return f"{ready}, not {plainest.ready:.0%}; they are prefetched up to {steps}"


def _shown_experts(choice: ExpertChoice) -> Iterator[Alternative]:
    """The fastest ones, and always what was chosen and what is plainest."""
    for number, one in enumerate(choice.alternatives):
        if number < _MOST_EXPERT_CHOICES or one in (choice.chosen, choice.plainest):
            yield one


def _turning(roofs: PolicyRoofs) -> Iterator[tuple[str, str]]:
    upper, lower = roofs.roofline.level_i, roofs.roofline.level_j
    p1, p2 = (f"({format_number(point, figures=3)} FLOP/B)" for point in (roofs.p1, roofs.p2))
    if roofs.p1 > 0:
        better = (f"experts kept there are better computed at {place}" for place in (upper, lower))
        yield f"P1 {lower}", f"{_from(roofs.p1_tokens, *better)} {p1}"
    link = f"{lower}->{upper}"
    yield f"P2 {lower}", f"{_from(roofs.p2_tokens, f'{link} does not bind', f'{link} binds')} {p2}"


def _from(tokens: float, then: str, before: str) -> str:
    """What holds from so many tokens a batch on; or what does before, if they are too many."""
    if tokens < _ENDLESS:
        return f"from {tokens:.0f} tokens a batch on, {then}"
    return f"{before}, however many tokens a batch has"


def _advice(answer: Answer) -> Iterator[tuple[str, str]]:
    for better in answer.improvements:
        change = better.change
        option = change.option or (f"--what-if '{change.what_if}'" if change.what_if else "")
        words = f"{plain(change.words)}  [dim]{whole(option)}[/]"
        yield f"[green]{better.speedup:.2f}x[/]", words
