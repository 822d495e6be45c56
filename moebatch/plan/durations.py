"""Durations of tasks from a file: kinds of tasks and their seconds."""

from collections.abc import Mapping
from pathlib import Path

from moebatch.schedule.task import Kind
from moebatch.spec.limits import number
from moebatch.spec.yaml_file import read_yaml
from moebatch.spec.yaml_reader import YamlReader

_MOST_S = 1e6


def load_durations(path: Path) -> Mapping[Kind, float]:
    """``attend: 0.002``: seconds by the kinds of `schedule/task.py`. YAML or JSON.

    Raises ConfigError with all faults of the file at once.
    """
    reader = _DurationsReader(read_yaml(path, kind="durations file"))
    durations = reader.durations()
    reader.finish()
    return durations


class _DurationsReader(YamlReader):
    def durations(self) -> dict[Kind, float]:
        """All entries; faults are kept."""
        entries = self._mapping((), self._file.content, tuple(Kind))
        found = {
            Kind(name): self._checked((name,), value, lambda value: number(value, 0, _MOST_S))
            for name, value in entries.items()
        }
        return {kind: seconds for kind, seconds in found.items() if seconds is not None}
