"""Worlds for tests: durations from a table, routing given or drawn."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moebatch.schedule.request import Sweep
from moebatch.schedule.task import Kind, Task


@dataclass
class TableWorld:
    """Every kind of task takes a fixed time; gates say what `choices` says."""

    seconds_of: Mapping[Kind, float]
    sweeps: Sequence[Sweep]
    choices: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    """By layer and micro-batch."""
    hot: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By layer, the likeliest first."""
    num_layers: int = 2
    num_experts: int = 4

    def begin_pass(self, number: int) -> Sweep:
        return self.sweeps[number]

    def chosen(self, step: int, micro_batch: int) -> Sequence[int]:
        return self.choices[step % self.num_layers, micro_batch]

    def selected(self, step: int, micro_batch: int, later: int) -> Sequence[int]:
        return self.chosen(later, micro_batch)

    def ranked(self, step: int) -> Sequence[int]:
        return self.hot.get(step % self.num_layers, range(self.num_experts))

    def chances(self, layer: int) -> Sequence[float]:
        hot = self.hot.get(layer, range(self.num_experts))
        return [float(expert in hot) for expert in range(self.num_experts)]

    def seconds(self, task: Task) -> float:
        return self.seconds_of.get(task.kind, 0.0)


@dataclass
class RandomWorld:
    """Durations and routing drawn anew for every task, the same for the same seed."""

    seed: int
    num_layers: int
    num_experts: int
    experts_per_batch: int
    sweeps: Sequence[Sweep]

    def _random(self, *names: object) -> random.Random:
        return random.Random(repr((self.seed, *names)))

    def begin_pass(self, number: int) -> Sweep:
        return self.sweeps[number]

    def chosen(self, step: int, micro_batch: int) -> Sequence[int]:
        return sorted(
            self._random("chosen", step, micro_batch).sample(
                range(self.num_experts), self.experts_per_batch
            )
        )

    def selected(self, step: int, micro_batch: int, later: int) -> Sequence[int]:
        return self.chosen(later, micro_batch)

    def ranked(self, step: int) -> Sequence[int]:
        experts = list(range(self.num_experts))
        self._random("ranked", step).shuffle(experts)
        return experts

    def chances(self, layer: int) -> Sequence[float]:
        chances = self._random("chances", layer)
        return [chances.choice((0.0, 0.5, 1.0)) for _ in range(self.num_experts)]

    def seconds(self, task: Task) -> float:
        return self._random("seconds", str(task)).choice((0.0, 0.1, 1.0, 2.5))
