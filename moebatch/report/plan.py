"""A planner's answer as a person reads it."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from moebatch.plan.answer import Answer
from moebatch.plan.prediction import Prediction
from moebatch.plan.roofs import PolicyRoofs, policy_roofs
from moebatch.report.console import plain, whole
from moebatch.report.experts import experts_view
from moebatch.report.tables import NAME_WIDTH, NamedRows, named_bars, notes_view, share_bar
from moebatch.spec.policy import Placement, Policy, shares_text
from moebatch.spec.workload import Workload
from moebatch.units import count_of, format_bytes, format_duration, format_number

_METHODS = {
    "milp": "MILP",
    "klotski": "Klotski's inequalities",
    "paper": "MoE-Lightning's own forms",
    "given": "as given",
}


def plan_view(answer: Answer) -> RenderableType:
    """Policy, speed, memory, lanes, turning points, and what would help."""
    parts: list[RenderableType] = [_title(answer), "", _policy(answer), "", _speed(answer)]
    parts += ["", _memory(answer.prediction), "", _lanes(answer.prediction)]
    if answer.experts is not None:
        parts += ["", experts_view(answer.experts)]
    turning = [
        line for roofs in policy_roofs(answer.problem, answer.policy) for line in _turning(roofs)
    ]
    if turning:
        parts += ["", Text("turning points of the experts", style="bold"), *turning]
    parts += ["", *_help(answer)]
    parts += ["", *notes_view(answer.notes)]
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
        f"prompts of {workload.mean_prompt_tokens:.0f} tokens, answers of up to "
        f"{workload.mean_new_tokens:.0f}, longest together {workload.max_total_tokens}"
    )
    if workload.num_sequences is None:
        return f"{lengths}; as many as there are (give --requests for a job time)"
    return f"{count_of(workload.num_sequences, 'sequence')}: {lengths}"


def _policy(answer: Answer) -> RenderableType:
    policy, grid = answer.policy, NamedRows(NAME_WIDTH)
    grid.add_row("policy", f"[dim]{_METHODS[answer.method]} ({plain(answer.solver)})[/]")
    tokens = f", up to {policy.tokens_per_pass} tokens a pass" * (policy.batching == "mixed")
    grid.add_row(
        "batch",
        f"[bold]{policy.batch_size}[/] sequences in {policy.num_micro_batches} micro-batches of "
        f"[bold]{policy.micro_batch_size}[/]{tokens}",
    )
    grid.add_row("computed", _places(policy, with_gpu=answer.problem.with_vram))
    grid.add_row("experts", _placed(policy.weights, answer.problem.num_experts))
    grid.add_row("KV cache", shares_text(policy.kv_cache) + f" ({policy.num_kv_pages} pages)")
    grid.add_row(
        "schedule", f"{policy.schedule}, {policy.num_slots} slots, {policy.batching} batches"
    )
    return grid


def _places(policy: Policy, *, with_gpu: bool) -> str:
    if not with_gpu:
        return "all on the CPU"
    attention = "GPU" if policy.attention_on_gpu else "CPU"
    experts = "GPU" if policy.ffn_on_gpu else "CPU"
    return f"attention on the {attention}, experts on the {experts}"


def _placed(weights: Placement, num_experts: int) -> str:
    counts = [
        f"{format_number(weights.on(level) * num_experts)} on {level}"
        for level in ("vram", "dram", "disk")
        if weights.on(level) > 0
    ]
    return f"{shares_text(weights)} ({', '.join(counts)} of {num_experts})"


def _speed(answer: Answer) -> RenderableType:
    prediction, grid = answer.prediction, NamedRows(NAME_WIDTH)
    workload = answer.problem.workload
    prompts = prediction.tokens_per_s * _prompts_per_token(workload)
    job = f"[bold green]{format_number(prediction.tokens_per_s)}[/] generated"
    job += f" and {format_number(prompts)} prompt tok/s"
    if prediction.job_time_s is not None:
        job += f", [bold]{format_duration(prediction.job_time_s)}[/] in all"
    if prediction.num_passes is not None:
        job += f", {count_of(round(prediction.num_passes), 'pass', 'passes')}"
    grid.add_row("job", job)
    grid.add_row(
        "",
        f"[dim]decoding alone {format_number(prediction.decode_tokens_per_s)} tok/s, prompts alone "
        f"{format_number(prediction.prefill_tokens_per_s)} tok/s[/]",
    )
    return grid


def _prompts_per_token(workload: Workload) -> float:
    return workload.mean_prompt_tokens / workload.mean_new_tokens


def _memory(prediction: Prediction) -> RenderableType:
    grid = named_bars(NAME_WIDTH)
    for level, capacity in prediction.capacity_bytes.items():
        peak = prediction.peak_bytes[level]
        if not peak:
            continue
        share = peak / capacity
        used = f"{format_bytes(peak)} of {format_bytes(capacity)}"
        grid.add_row(f"{level}", share_bar(share), used)
    return grid


def _lanes(prediction: Prediction) -> RenderableType:
    grid = named_bars(NAME_WIDTH)
    grid.add_row("per layer", "", f"[bold]{format_duration(prediction.layer_time_s)}[/]")
    for lane, seconds in sorted(prediction.lanes_s.items(), key=lambda pair: -pair[1]):
        binds = lane == prediction.bottleneck
        name = f"[bold yellow]{lane}[/]" if binds else lane
        share = seconds / prediction.layer_time_s if prediction.layer_time_s else 0.0
        note = " [bold yellow]binds[/]" if binds else ""
        grid.add_row(name, share_bar(share), f"{format_duration(seconds)}{note}")
    return grid


def _turning(roofs: PolicyRoofs) -> Iterator[RenderableType]:
    upper, lower = roofs.roofline.level_i, roofs.roofline.level_j
    grid = NamedRows(NAME_WIDTH)
    if roofs.p1 > 0:
        grid.add_row(
            f"P1 {lower}",
            f"from {_tokens(roofs.p1_tokens)} a batch on, experts are better computed at {upper} "
            f"({format_number(roofs.p1, figures=3)} FLOP/B)",
        )
    grid.add_row(
        f"P2 {lower}",
        f"from {_tokens(roofs.p2_tokens)} a batch on, {lower}->{upper} does not bind "
        f"({format_number(roofs.p2, figures=3)} FLOP/B)",
    )
    yield grid


def _tokens(count: float) -> str:
    return f"{count:.0f} tokens" if count < 1e9 else "no number of tokens"


def _help(answer: Answer) -> Iterator[RenderableType]:
    if not answer.improvements:
        return
    yield Text("what would help most", style="bold")
    grid = NamedRows(NAME_WIDTH)
    for better in answer.improvements:
        option = whole(f"--what-if '{better.what_if}'") if better.what_if else ""
        grid.add_row(
            f"[green]{better.speedup:.2f}x[/]", f"{plain(better.change)}  [dim]{option}[/]"
        )
    yield grid
