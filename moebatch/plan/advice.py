"""What would help most: the same problem solved again with twice as much of one thing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moebatch.plan.planner import Planned, best_seconds, ranked_among, screen
from moebatch.plan.problem import Problem
from moebatch.spec.hardware import Hardware, Level, LevelName, Link, Processor
from moebatch.units import format_bytes, format_rate

FACTOR = 2.0
_WORTH_SAYING = 1.01
_NOUNS: dict[LevelName, str] = {"vram": "GPU", "dram": "CPU", "disk": "disk"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Improvement:
    """A change of the machine and what it would bring."""

    change: str
    """In words: what, how much of it."""
    what_if: str | None
    """The same for ``--what-if``, where one option says it."""
    speedup: float
    """Job time now over job time then, batch and shares being chosen anew."""


def improvements(problem: Problem, planned: Planned) -> list[Improvement]:
    """All changes worth saying, the best first; each is planned anew, over all candidates where
    memory grows, over those that were near the best where something gets faster."""
    now_s = planned.solution.seconds_per_sequence
    near = [item.candidate for item in planned.candidates]
    found = []
    for change, what_if, hardware in _changes(problem.hardware):
        changed = replace(problem, hardware=hardware)
        more_memory = hardware.links == problem.hardware.links and what_if is not None
        ranked = planned.ranked if more_memory else ranked_among(changed, near)
        best_s = min(best_seconds(screen(changed, ranked)), now_s)
        if now_s / best_s >= _WORTH_SAYING:
            found.append(Improvement(change=change, what_if=what_if, speedup=now_s / best_s))
    return sorted(found, key=lambda improvement: -improvement.speedup)


def _changes(hardware: Hardware) -> Iterator[tuple[str, str | None, Hardware]]:
    """Twice the capacity of a level, the bandwidth of a link, the speed of a processor."""
    for level in hardware.levels.values():
        if level.name != "disk":
            twice = int(level.capacity_bytes * FACTOR)
            changed = replace(level, capacity_bytes=twice)
            size = f"{twice / 2**30:.4g}GiB"
            yield (
                f"twice the {level.name} ({format_bytes(twice)})",
                f"{level.name}={size}",
                _with_level(hardware, changed),
            )
        if level.processor is not None:
            faster = replace(level, processor=_faster(level.processor))
            name = _NOUNS[level.name]
            yield f"a {name} twice as fast", None, _with_level(hardware, faster)
    for link in hardware.links.values():
        yield from _link_changes(hardware, link)


def _link_changes(hardware: Hardware, link: Link) -> Iterator[tuple[str, str | None, Hardware]]:
    figures = {link.name: "bandwidth", f"{link.name}.staging": "staging_bandwidth"}
    for name, field in figures.items():
        rate = getattr(link, field)
        if rate:
            changed = replace(link, **{field: rate * FACTOR})
            yield (
                f"twice the rate of {name} ({format_rate(rate * FACTOR)})",
                f"{name}={rate * FACTOR / 1e9:.4g}GB/s",
                replace(hardware, links={**hardware.links, link.name: changed}),
            )


def _with_level(hardware: Hardware, level: Level) -> Hardware:
    return replace(hardware, levels={**hardware.levels, level.name: level})


def _faster(processor: Processor) -> Processor:
    return replace(
        processor,
        gemm={dtype: curve.scaled(FACTOR) for dtype, curve in processor.gemm.items()},
        gemm_streamed={d: curve.scaled(FACTOR) for d, curve in processor.gemm_streamed.items()},
        bandwidth=processor.bandwidth * FACTOR,
        attention_bandwidth=processor.attention_bandwidth * FACTOR,
        attention_flops=processor.attention_flops * FACTOR,
        elementwise_bandwidth=processor.elementwise_bandwidth * FACTOR,
        sequence_s=processor.sequence_s / FACTOR,
        widening_bandwidth=processor.widening_bandwidth * FACTOR,
    )
