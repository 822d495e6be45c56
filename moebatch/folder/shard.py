"""One of several runs that share a job."""

import re
from dataclasses import dataclass

from moebatch.errors import ConfigError
from moebatch.quoting import shown

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
        return self.count == 1

    def has(self, index: int) -> bool:
        """Whether the row with this index, from 0, is one of its rows."""
        return index % self.count == self.number - 1


ALL = Shard(1, 1)


@dataclass(frozen=True, slots=True)
class AskedShard:
    """What a command says of its shard."""

    number: int
    count: int | None = None
    """None is as many as the first run of the job was given."""


def parse_shard(text: str) -> AskedShard:
    """``3/8`` is the third of eight, ``3`` the third of all there are. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,6})(?:/(\d{1,6}))?", text)
    if match is not None:
        asked = AskedShard(int(match[1]), int(match[2]) if match[2] else None)
        if 1 <= asked.number <= (asked.count or _MOST_SHARDS) <= _MOST_SHARDS:
            return asked
    raise _refusal(f"must be a number from 1 to n and n, such as 3/8, got {shown(text)}")


def agreed_shard(asked: AskedShard | None, num_shards: int | None, task: int | None) -> Shard:
    """The shard of a run; `num_shards` is that of earlier runs of the job, if they had any.

    A run that asks for none has all rows, unless it is the `task` of an array of a job in shards:
    how many there are is never taken from the array, which may have been asked for single ones.
    Raises ConfigError if what is asked for does not go with that.
    """
    if asked is None:
        if task is None or num_shards is None or not 1 <= task <= num_shards:
            return ALL
        return Shard(task, num_shards)
    count = asked.count or num_shards
    if count is None:
        raise _refusal(
            f"no run of this job has said yet how many shards there are; say {asked.number}/n"
        )
    if num_shards is not None and count not in (1, num_shards):
        raise _refusal(
            f"the rows of this job are divided into {num_shards} shards, not {count}, as its first "
            f"run said; use --shard {min(asked.number, num_shards)}/{num_shards}, or leave it out "
            "to do all rows that are left"
        )
    if asked.number > count:
        raise _refusal(f"there are {count} shards, numbered from 1, and none is {asked.number}")
    return Shard(asked.number, count)


def _refusal(message: str) -> ConfigError:
    return ConfigError.at("moebatch run", message, where="--shard")
