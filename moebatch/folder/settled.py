"""What the first run of a job settles for all later ones."""

import datetime
import time
from dataclasses import dataclass, replace
from typing import Any

from moebatch.folder.shard import Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What would otherwise depend on the day or the command of each run."""

    date: datetime.date
    """What chat templates that ask for the date are told: prompts of a run that is gone on with
    after midnight stay the same."""
    created: int = 0
    """Unix time of the first run, which stands in all answers: what is gone on with ends with the
    bytes of what was not stopped. 0 in folders of versions that did not keep it."""
    num_shards: int | None = None
    """Into how many shards the rows are divided; None if no run has asked for it."""

    def joined(self, later: "Settled") -> "Settled":
        """What is settled when a `later` run comes. Its number of shards has been agreed upon."""
        return replace(self, num_shards=later.num_shards or self.num_shards)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "date": self.date.isoformat(),
            "created": self.created,
            "num_shards": self.num_shards,
        }

    @classmethod
    def from_json(cls, content: object) -> "Settled | None":
        """What `as_json` gave; None if it is something else."""
        if not isinstance(content, dict):
            return None
        num_shards, created = content.get("num_shards"), content.get("created", 0)
        if isinstance(num_shards, bool) or not isinstance(num_shards, int | None):
            return None
        if isinstance(created, bool) or not isinstance(created, int):
            return None
        try:
            date = datetime.date.fromisoformat(content["date"])
        except (KeyError, TypeError, ValueError):
            return None
        return cls(date=date, created=created, num_shards=num_shards)


def of_today(shard: Shard) -> Settled:
    """What a run would settle by itself."""
    num_shards = None if shard.is_all else shard.count
    now = int(time.time())
    return Settled(date=datetime.date.today(), created=now, num_shards=num_shards)
