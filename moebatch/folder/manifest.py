"""What a run folder belongs to: everything about a job that decides over its answers."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from moebatch.folder.row_key import RowKeys
from moebatch.spec.limits import shown


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Identity of a job: two jobs with equal fields give the same answers to the same rows."""

    fields: Mapping[str, str]
    """By the names under which a user knows them."""

    @cached_property
    def row_keys(self) -> RowKeys:
        """What the rows of this job are known by."""
        text = json.dumps(dict(self.fields), sort_keys=True)
        return RowKeys(hashlib.blake2b(text.encode(), digest_size=32).digest())

    def differences(self, other: "Manifest") -> list[str]:
        """Fields that are not as in `other`, with both values."""
        names = sorted(self.fields.keys() | other.fields.keys())
        return [
            f"{name} was {shown(other.fields.get(name))}, is {shown(self.fields.get(name))}"
            for name in names
            if self.fields.get(name) != other.fields.get(name)
        ]
