"""Tasks, and what lanes wait for, in words."""

from collections.abc import Mapping

from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.lane_statistics import LAUNCH
from moebatch.schedule.timeline.task_name import reason_kind, task_named
from moebatch.schedule.timeline.timeline import Bubble

_NOUNS: Mapping[Kind, str] = {
    Kind.ATTEND: "attention",
    Kind.PRE: "projections",
    Kind.OFF: "queries",
    Kind.ATTN: "CPU attention",
    Kind.LOAD: "attention results",
    Kind.OUT: "output projection",
    Kind.POST: "MoE block",
    Kind.GATE: "gate",
    Kind.COMBINE: "sum over experts",
    Kind.DENSE: "dense MLP",
    Kind.CHUNK: "transfer",
    Kind.FETCH: "read",
    Kind.STAGE: "staging",
    Kind.PAGE: "transfer",
    Kind.BLOCK: "transfer of all weights",
    Kind.KV_READ: "KV read",
    Kind.KV_UP: "KV copy up",
    Kind.KV_DOWN: "KV copy down",
    Kind.KV_WRITE: "KV write",
}
WAITS: Mapping[str, str] = {
    Kind.ATTEND: "attention",
    Kind.PRE: "projections",
    Kind.OFF: "queries on their way to the CPU",
    Kind.ATTN: "attention on the CPU",
    Kind.LOAD: "results of attention on their way up",
    Kind.OUT: "output projections",
    Kind.POST: "MoE blocks being computed",
    Kind.GATE: "gates",
    Kind.EXPERT: "experts being computed",
    Kind.COMBINE: "outputs of experts being added up",
    Kind.DENSE: "dense MLPs",
    Kind.CHUNK: "experts on their way",
    Kind.FETCH: "experts being read from disk",
    Kind.STAGE: "weights being pinned",
    Kind.PAGE: "weights on their way",
    Kind.BLOCK: "weights of a whole layer on their way",
    Kind.KV_READ: "KV cache being read from disk",
    Kind.KV_UP: "KV cache on its way up",
    Kind.KV_DOWN: "KV cache on its way down",
    Kind.KV_WRITE: "KV cache being written to disk",
    LAUNCH: "work to be launched",
}
"""What a lane waits for, by the kind of task that ended last; for "waited for ..."."""


def waits_words(kind: str) -> str:
    """What tasks of a kind are for those who wait for them; unknown kinds are named as they are."""
    return WAITS.get(kind, kind)


def task_words(task: Task, num_layers: int) -> str:
    """``expert 5 of layer 3``, ``CPU attention of micro-batch 2 in layer 3``."""
    layer = task.step % num_layers
    return f"{_what(task)} {'of' if task.micro_batch is None else 'in'} layer {layer}"


def task_label(task: Task, num_layers: int) -> str:
    """``L3 expert 5``, ``L3 attend mb 2``: a name for tools that draw timelines."""
    words = [f"L{task.step % num_layers}", str(task.kind)]
    if task.expert is not None:
        words.append(str(task.expert) if task.kind is Kind.EXPERT else f"expert {task.expert}")
    numbers = ("mb", task.micro_batch), ("page", task.page), ("part", task.part)
    for name, number in numbers:
        if number is not None:
            words.append(str(number) if name == task.kind else f"{name} {number}")
    return " ".join(words)


def seconds_text(seconds: float) -> str:
    """``1.04 s``, ``79.6 ms``, ``12 µs``: to three figures, so that schedules can be compared."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            number = seconds / size
            return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"
    return f"{seconds * 1e6:.0f} µs" if seconds else "0 s"


def bubble_words(bubble: Bubble, num_layers: int) -> str:
    """``before expert 5 of layer 3: its transfer``: what ran next, and what it had waited for."""
    return f"before {task_words(bubble.before, num_layers)}: {_reason(bubble, num_layers)}"


def _reason(bubble: Bubble, num_layers: int) -> str:
    task, before = task_named(bubble.waited_for), bubble.before
    if bubble.waited_for == LAUNCH:
        return "it had not been launched"
    if task is None:
        return waits_words(reason_kind(bubble.waited_for))
    if _is_own(task, before):
        return f"its {_NOUNS[task.kind]}"
    return task_words(task, num_layers)


def _is_own(task: Task, before: Task) -> bool:
    """Whether a task was for nobody but the one that waited for it."""
    if task.step != before.step or task.kind not in _NOUNS or task.kind == before.kind:
        return False
    if task.expert is not None:
        return task.expert == before.expert
    if task.page is not None:
        return task.page == before.page
    return task.micro_batch is not None and task.micro_batch == before.micro_batch


def _what(task: Task) -> str:
    expert = None if task.expert is None else f"expert {task.expert}"
    words = expert if task.kind is Kind.EXPERT and expert else _NOUNS.get(task.kind, task.kind)
    if expert and words != expert:
        words += f" of {expert}"
    if task.page is not None:
        words += f" of page {task.page}"
    if task.micro_batch is not None:
        words += f" of micro-batch {task.micro_batch}"
    return words
