"""Which rows of an input a run has to do."""

from dataclasses import dataclass

from moebatch.folder.answered import Answered
from moebatch.folder.shard import ALL, Shard
from moebatch.rows.raw import RawRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Todo:
    """Rows of a shard that have no answer yet."""

    shard: Shard = ALL
    answered: Answered | None = None
    """What earlier runs have made of them; None if there were none."""

    def has(self, raw: RawRow) -> bool:
        """Whether a row is of this shard."""
        return self.shard.has(raw.index)

    def name_if_done(self, raw: RawRow) -> int | None:
        """The hash of the name of a row that has an answer, 0 if it has no name; None if it has no
        answer. Rows that failed are tried again."""
        found = None if self.answered is None else self.answered.of(raw)
        return found.name if found is not None and found.state == "done" else None


EVERYTHING = Todo()
