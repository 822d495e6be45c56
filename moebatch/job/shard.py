"""One of several runs that share a job."""

import re
from dataclasses import dataclass

from moebatch.errors import ConfigError, Fault

_MOST_SHARDS = 100_000


@dataclass(frozen=True, slots=True)
class Shard:
    """Every n-th row, so that rows may be appended to the input without any changing its shard."""

    number: int
    """From 1 on."""
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def is_all(self) -> bool:
        """Whether there is only this one."""
        return self.count == 1

    def has(self, index: int) -> bool:
        """Whether the row with this index, from 0, is one of its rows."""
        return index % self.count == self.number - 1


ALL = Shard(1, 1)


def parse_shard(text: str, *, where: str = "--shard") -> Shard:
    """``3/8`` is the third of eight. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    shard = Shard(int(match[1]), int(match[2])) if match else None
    if shard is None or not 1 <= shard.number <= shard.count <= _MOST_SHARDS:
        message = f"must be a number from 1 to n and n, such as 3/8, got {text!r}"
        raise ConfigError([Fault(file="moebatch run", where=where, message=message)])
    return shard
