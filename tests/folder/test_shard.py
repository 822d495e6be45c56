"""Which rows a run has, from what is asked for, what is settled, and what Slurm says."""

import pytest

from moebatch.errors import ConfigError
from moebatch.folder.shard import ALL, AskedShard, Shard, agreed_shard, parse_shard


def test_shards_are_every_nth_row_and_together_all() -> None:
    shards = [Shard(number, 3) for number in (1, 2, 3)]
    owners = [[shard.number for shard in shards if shard.has(index)] for index in range(7)]
    assert owners == [[1], [2], [3], [1], [2], [3], [1]]


@pytest.mark.parametrize(
    ("text", "asked"),
    [("3/8", AskedShard(3, 8)), ("1/1", AskedShard(1, 1)), ("7", AskedShard(7))],
)
def test_as_it_is_written(text: str, asked: AskedShard) -> None:
    assert parse_shard(text) == asked


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "3/", "a/b", "-1/3", "1/2/3", "1/1000000", "0"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 3/8"):
        parse_shard(text)


@pytest.mark.parametrize(
    ("asked", "num_shards", "task", "agreed"),
    [
        (None, None, None, ALL),
        (None, None, 3, ALL),  # an array of jobs that have nothing to do with shards
        (None, 8, None, ALL),
        (None, 8, 1, Shard(1, 8)),
        (None, 8, 3, Shard(3, 8)),
        (None, 8, 8, Shard(8, 8)),
        (None, 8, 9, ALL),
        (AskedShard(2, 4), None, 3, Shard(2, 4)),
        (AskedShard(2), 4, None, Shard(2, 4)),
        (AskedShard(4), 4, None, Shard(4, 4)),
        (AskedShard(1, 1), 4, 2, ALL),
    ],
)
def test_what_is_agreed(
    asked: AskedShard | None, num_shards: int | None, task: int | None, agreed: Shard
) -> None:
    assert agreed_shard(asked, num_shards, task) == agreed


@pytest.mark.parametrize(
    ("asked", "num_shards", "message"),
    [
        (AskedShard(2), None, "say 2/n"),
        (AskedShard(2, 4), 8, "into 8 shards, not 4"),
        (AskedShard(9), 8, "there are 8 shards"),
    ],
)
def test_what_does_not_go_together(asked: AskedShard, num_shards: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agreed_shard(asked, num_shards, None)
