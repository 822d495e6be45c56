"""What the command line of `moebatch plan` asks for, before it is looked up."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moebatch.errors import ConfigError, Fault
from moebatch.schedule.registry import schedule_faults, unknown_schedule
from moebatch.spec.hardware import Basis
from moebatch.spec.policy_file import PolicyFile, load_policy
from moebatch.spec.workload import Workload

ChosenMethod = Literal["milp", "klotski"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Options by their long names; None where they are not given."""

    has_job: bool
    """Whether a job file is given, which says model and lengths itself."""
    hw: str | None = None
    model: str | None = None
    prompt_len: int | None = None
    gen_len: int | None = None
    requests: int | None = None
    what_if: tuple[str, ...] = ()
    method: ChosenMethod = "milp"
    paper: bool = False
    vendor: bool = False
    policy: str | None = None
    schedule: str | None = None
    """Instead of the policy's own."""
    command: str = "moebatch plan"
    """What was typed."""

    @property
    def basis(self) -> Basis:
        """Which figures of the profile are meant."""
        return "paper" if self.paper else "peak" if self.vendor else "achieved"

    def require_consistent(self) -> None:
        """Raises ConfigError with all contradictions and everything that is missing."""
        faults = [
            Fault(file=self.command, where=where, message=message)
            for where, message in self._contradictions()
        ]
        if faults:
            raise ConfigError(faults)

    def stated_workload(self) -> Workload:
        """The workload of ``--prompt-len``, ``--gen-len`` and ``--requests``."""
        assert self.prompt_len is not None and self.gen_len is not None, "checked before"
        return Workload.uniform(
            prompt_tokens=self.prompt_len, new_tokens=self.gen_len, num_sequences=self.requests
        )

    def given_policy(self) -> PolicyFile | None:
        """The policy of ``--policy``, if there is one. Raises ConfigError."""
        return None if self.policy is None else load_policy(self.policy, rules=schedule_faults)

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        lengths = {
            "--model": self.model,
            "--prompt-len": self.prompt_len,
            "--gen-len": self.gen_len,
        }
        for option, value in lengths.items():
            if self.has_job and value is not None:
                yield option, "not together with a job file, which says it itself"
            if not self.has_job and value is None:
                yield option, "is missing; give a job file, or --model, --prompt-len and --gen-len"
        if self.has_job and self.requests is not None:
            yield "--requests", "not together with a job file, whose input is counted"
        if self.paper and self.vendor:
            yield "--vendor", "not together with --paper, which has constants of its own"
        if self.paper and self.method != "milp":
            yield "--method", "not together with --paper, which has a method of its own"
        if self.policy is not None and (self.paper or self.method != "milp"):
            yield "--policy", "is predicted as it is; leave out --paper and --method"
        if self.schedule is not None:
            if self.paper or self.method != "milp":
                yield "--schedule", "is chosen by --paper and by --method; leave these out"
            yield from (("--schedule", message) for message in unknown_schedule(self.schedule))
