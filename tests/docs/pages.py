"""Pages of the documentation, and the blocks, links and tables in them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = (
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
)
RUNNABLE = ("console", "python")
"""Languages of blocks that are run unless a comment before them says why not."""

_FENCE = re.compile(r"^```(\w*)$")
_NOT_RUN = re.compile(r"^<!-- not run: (\S.*) -->$")
_FILE_NAME = re.compile(r"^(?:# |<!-- file: )([\w-]+\.(?:yaml|py|jsonl))(?: -->)?$")
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_CODE = re.compile(r"`[^`\n]+`")


@dataclass(kw_only=True, slots=True)
class Block:
    """A fenced block."""

    language: str
    line: int
    """Line number of its first line, counted from 1."""
    before: str
    """The line before the block that is not empty."""
    lines: list[str] = field(default_factory=list)

    @property
    def not_run(self) -> str | None:
        """Why its commands are not run, as the comment before it says."""
        found = _NOT_RUN.match(self.before)
        return found[1] if found else None

    @property
    def file_name(self) -> str | None:
        """The file that a reader makes of it, named in a comment in its first line or before it."""
        named = (_FILE_NAME.match(line) for line in (self.before, *self.lines[:1]))
        return next((found[1] for found in named if found), None)


def blocks(text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found: list[Block] = []
    is_open, before = False, ""
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence and not is_open:
            found.append(Block(language=fence[1], line=number + 1, before=before))
            is_open = True
        elif fence:
            is_open = False
        elif is_open:
            found[-1].lines.append(line)
        before = line or before
    assert not is_open, "the last block has no end"
    return found


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    kept, is_open = [], False
    for line in text.splitlines():
        if _FENCE.match(line):
            is_open = not is_open
        elif not is_open:
            kept.append(line)
    return "\n".join(kept)


def links(text: str) -> list[str]:
    """Targets of the links of a page; code is no link."""
    return _LINK.findall(_CODE.sub("``", prose(text)))


def anchors(text: str) -> set[str]:
    """What a link to a heading of the page may name, as GitHub makes it of the heading."""
    headings = (line.lstrip("#") for line in prose(text).splitlines() if re.match("#+ ", line))
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


def codes(text: str) -> set[str]:
    """What a page's prose has in code quotes."""
    return {code.strip("`") for code in _CODE.findall(prose(text))}


def first_cells(text: str, heading: str) -> list[str]:
    """First cells of the rows of all tables under a heading, down to the next heading of any
    depth."""
    return [cells[0] for cells in table_rows(text, heading)]


def table_rows(text: str, heading: str) -> Iterator[list[str]]:
    """Cells of the rows of all tables under a heading, without the tables' head."""
    lines = text.splitlines()
    assert heading in lines, f"no heading {heading!r}"
    under = lines[lines.index(heading) + 1 :]
    end = next((i for i, line in enumerate(under) if line.startswith("#")), len(under))
    rows = [line for line in under[:end] if line.startswith("|")]
    heads = {i for i, row in enumerate(rows[1:]) if set(row) <= set("|-: ")}
    for i, row in enumerate(rows):
        if i not in heads and i - 1 not in heads:
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|"))]
