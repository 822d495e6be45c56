"""What a run folder belongs to: everything about a job that decides over its answers."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from moebatch.folder.row_key import RowKeys
from moebatch.quoting import shown

INPUT_PATH = "input.path"
"""The one field that decides nothing: folders and files may be moved, linked and compressed."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Identity of a job: two jobs without differences give the same answers to the same rows."""

    fields: Mapping[str, str]
    """By the names under which a user knows them; among them where rows were first read."""

    @cached_property
    def row_keys(self) -> RowKeys:
        """What the rows of this job are known by, as long as this stays the manifest of its run
        folder."""
        text = json.dumps(dict(self.fields), sort_keys=True)
        return RowKeys(hashlib.blake2b(text.encode(), digest_size=32).digest())

    def differences(self, other: "Manifest") -> list[str]:
        """What makes it another job than `other`, with both values."""
        names = sorted((self.fields.keys() | other.fields.keys()) - {INPUT_PATH})
        return [
            f"{name} was {shown(other.fields.get(name))}, is {shown(self.fields.get(name))}"
            for name in names
            if self.fields.get(name) != other.fields.get(name)
        ]
