"""Policy file: a policy, what it was made for, and what is known of its speed.

`moebatch plan` writes one, and commands that need a policy take one instead of planning.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from moebatch.spec.files.library import find
from moebatch.spec.machine.hardware import LEVELS
from moebatch.spec.policy.policy import OpenPolicy, Placement
from moebatch.spec.workload import Workload

_TEXTS = ("title", "source", "note", "model", "hardware")
_RECORDS = ("published", "prediction")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFile:
    """A policy with its story. All but the policy only informs."""

    title: str
    policy: OpenPolicy
    source: str = ""
    """Where the policy comes from."""
    note: str = ""
    """What a reader should know, such as what is assumed."""
    model: str = ""
    """Name or path of the model that it was made for."""
    hardware: str = ""
    """Name or path of the profile that it was made for."""
    workload: Workload | None = None
    """Means of the workload that it was made for."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """Figures that were measured with it, such as ``tokens_per_s``."""
    prediction: Mapping[str, Any] = field(default_factory=dict)
    """What was predicted when it was made: any plain data."""
    path: str = ""
    """File that it was read from."""

    def to_yaml(self) -> str:
        """The text of a policy file that reads as this one."""
        # Here, so that commands start without YAML.
        from moebatch.spec.files.yaml_file import as_yaml

        content: dict[str, object] = {
            key: getattr(self, key) for key in _TEXTS if getattr(self, key)
        }
        if self.workload is not None:
            content["workload"] = _workload_keys(self.workload)
        content["policy"] = _policy_keys(self.policy)
        content |= {key: dict(getattr(self, key)) for key in _RECORDS if getattr(self, key)}
        return as_yaml(content)


Rules = Callable[[OpenPolicy], Iterable[tuple[str, str]]]
"""Field and message of all that a policy contradicts."""


def load_policy(name_or_path: str | Path, *, rules: Rules = lambda policy: ()) -> PolicyFile:
    """The policy of a file, or the one of that name which comes with moebatch.

    Args:
        rules: what a policy has to keep to beside its own form, such as the needs of a schedule.

    Raises ConfigError with all faults of the file at once, or with the names that exist.
    """
    # Here, so that commands start without pydantic.
    from moebatch.spec.files.form import given, read_form
    from moebatch.spec.policy.form import PolicyForm

    path = find("saved", str(name_or_path))
    content = given(read_form(path, PolicyForm, kind="policy file", rules=rules))
    return PolicyFile(**{"title": path.stem, **content, "path": str(path)})


def _workload_keys(workload: Workload) -> dict[str, object]:
    content: dict[str, object] = {
        "prompt_tokens": workload.mean_prompt_tokens,
        "new_tokens": workload.mean_new_tokens,
    }
    if workload.num_sequences is not None:
        content["requests"] = workload.num_sequences
    return content


def _policy_keys(policy: OpenPolicy) -> dict[str, object]:
    values = {entry.name: getattr(policy, entry.name) for entry in fields(OpenPolicy)}
    for name, value in values.items():
        if isinstance(value, Placement):
            values[name] = {level: value.on(level) for level in LEVELS if value.on(level)}
    return {name: value for name, value in values.items() if value is not None}
