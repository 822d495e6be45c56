"""Names of tasks, and of what lanes wait for."""

from collections.abc import Mapping, Sequence

from moebatch.schedule.task import Kind, Task, reason_kind, task_named
from moebatch.schedule.timeline.timeline import LAUNCH, Bubble
from moebatch.units import three_figures

_NAMES: Mapping[str, tuple[str, str]] = {
    Kind.ATTEND: ("attention", "attention"),
    Kind.PRE: ("projections", "projections"),
    Kind.OFF: ("queries", "queries on their way to the CPU"),
    Kind.ATTN: ("CPU attention", "attention on the CPU"),
    Kind.LOAD: ("attention results", "results of attention on their way up"),
    Kind.OUT: ("output projection", "output projections"),
    Kind.POST: ("MoE block", "MoE blocks being computed"),
    Kind.GATE: ("gate", "gates"),
    Kind.EXPERT: ("expert", "experts being computed"),
    Kind.COMBINE: ("sum over experts", "outputs of experts being added up"),
    Kind.DENSE: ("dense MLP", "dense MLPs"),
    Kind.CHUNK: ("transfer", "experts on their way"),
    Kind.FETCH: ("read", "experts being read from disk"),
    Kind.STAGE: ("staging", "weights being pinned"),
    Kind.PAGE: ("transfer", "weights on their way"),
    Kind.BLOCK: ("transfer of all weights", "weights of a whole layer on their way"),
    Kind.LAYER_UP: ("weights outside experts", "weights outside experts on their way"),
    Kind.KV_READ: ("KV read", "KV cache being read from disk"),
    Kind.KV_UP: ("KV copy up", "KV cache on its way up"),
    Kind.KV_DOWN: ("KV copy down", "KV cache on its way down"),
    Kind.KV_WRITE: ("KV write", "KV cache being written to disk"),
    LAUNCH: ("launch", "work to be launched"),
}
"""What a task is called, and what a lane waits for while a task of that kind runs; for "waited for
..."."""


def wait_text(kind: str) -> str:
    """What a lane waits for, by the kind of task that ended last; an unknown kind is its own
    name."""
    return _NAMES[kind][1] if kind in _NAMES else kind


def task_text(task: Task, num_layers: int) -> str:
    """``expert 5 of layer 3``, ``CPU attention of micro-batch 2 in layer 3``."""
    layer = task.step % num_layers
    return f"{_what(task)} {'of' if task.micro_batch is None else 'in'} layer {layer}"


def task_label(task: Task, num_layers: int) -> str:
    """``L3 expert 5``, ``L3 attend mb 2``: a name for tools that draw timelines."""
    words = [f"L{task.step % num_layers}", str(task.kind)]
    if task.expert is not None:
        which = _numbers(task.experts)
        words.append(which if task.kind is Kind.EXPERT else f"expert {which}")
    numbers = ("mb", task.micro_batch), ("page", task.page), ("part", task.part)
    for name, number in numbers:
        if number is not None:
            words.append(str(number) if name == task.kind else f"{name} {number}")
    return " ".join(words)


def seconds_text(seconds: float) -> str:
    """``1.04 s``, ``79.6 ms``, ``12 µs``: to three figures, so that schedules can be compared."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * size:
            return f"{three_figures(seconds / size)} {unit}"
    return f"{seconds * 1e6:.0f} µs" if seconds else "0 s"


def bubble_text(bubble: Bubble, num_layers: int) -> str:
    """``before expert 5 of layer 3: its transfer``: what ran next, and what it had waited for."""
    return f"before {task_text(bubble.before, num_layers)}: {_reason(bubble, num_layers)}"


def _reason(bubble: Bubble, num_layers: int) -> str:
    task, before = task_named(bubble.waited_for), bubble.before
    if bubble.waited_for == LAUNCH:
        return "it had not been launched"
    if task is None:
        return wait_text(reason_kind(bubble.waited_for))
    if _is_own(task, before):
        return f"its {_NAMES[task.kind][0]}"
    return task_text(task, num_layers)


def _is_own(task: Task, before: Task) -> bool:
    """Whether only `before` needed the task."""
    if task.step != before.step or task.kind is Kind.EXPERT or task.kind == before.kind:
        return False
    if task.expert is not None:
        return task.expert in before.experts
    if task.page is not None:
        return task.page == before.page
    return task.micro_batch is not None and task.micro_batch == before.micro_batch


def _numbers(experts: Sequence[int]) -> str:
    """``5``, or ``5, 7, 12``."""
    return ", ".join(map(str, experts))


def _what(task: Task) -> str:
    several = "s" * (len(task.experts) > 1)
    expert = None if task.expert is None else f"expert{several} {_numbers(task.experts)}"
    words = expert if task.kind is Kind.EXPERT and expert else _NAMES[task.kind][0]
    if expert and words != expert:
        words += f" of {expert}"
    if task.page is not None:
        words += f" of page {task.page}"
    if task.micro_batch is not None:
        words += f" of micro-batch {task.micro_batch}"
    return words
