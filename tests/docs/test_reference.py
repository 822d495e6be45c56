"""Tables of the documentation list all that there is, and nothing else."""

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from moebatch.checkpoint.gguf.families import FAMILIES
from moebatch.cli import app
from moebatch.errors import ExitCode
from moebatch.schedule.definition import Traits
from moebatch.schedule.registry import SCHEDULES
from moebatch.schedule.request import Request
from moebatch.schedule.task import Kind
from moebatch.spec.job import Job
from moebatch.spec.policy.policy import OpenPolicy
from tests.docs.pages import PAGES, REPOSITORY, codes, first_cells, table_rows

DOCS = REPOSITORY / "docs"
_SECTIONS: dict[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in Job.model_fields.items()
    if isinstance(field.annotation, type)
}


def text(page: str) -> str:
    return (DOCS / page).read_text()


@pytest.mark.parametrize("section", _SECTIONS)
def test_jobs_md_lists_every_key_of_a_job_file(section: str) -> None:
    rows = {cells[0].strip("`"): cells for cells in table_rows(text("jobs.md"), f"### `{section}`")}
    fields = _SECTIONS[section].model_fields
    assert sorted(rows) == sorted(fields)
    for key, field in fields.items():
        _, values, default, meaning = rows[key]
        assert meaning
        assert default == _shown_default(field.default, field.default_factory), key
        if get_origin(field.annotation) is Literal:
            assert re.findall(r"`([^`]+)`", values) == list(get_args(field.annotation)), key


def _shown_default(default: Any, factory: Any) -> str:
    """As the table has it; what None means is said in words."""
    if factory is not None:
        return f"`{factory()}`".replace("`{}`", "none")
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "none"
    return f"`{str(default).lower()}`" if isinstance(default, bool) else f"`{default}`"


def test_operations_md_lists_every_exit_code() -> None:
    listed = first_cells(text("operations.md"), "## Exit codes")
    assert list(map(int, listed)) == list(ExitCode)


def test_index_md_lists_every_command() -> None:
    listed = first_cells(text("index.md"), "# Documentation")
    assert sorted(listed) == sorted(f"`moebatch {command}`" for command in _options())


def test_schedules_md_lists_every_schedule() -> None:
    listed = [
        name
        for cell in first_cells(text("schedules.md"), "## The schedules")
        for name in re.findall(r"`([^`]+)`", cell)
    ]
    assert sorted(listed) == sorted(SCHEDULES)


def test_weights_md_lists_every_architecture_of_gguf() -> None:
    (families,) = (
        row[1] for row in table_rows(text("weights.md"), "## GGUF") if row[0] == "families"
    )
    assert sorted(re.findall(r"`([^` ]+)`", families)) == sorted(FAMILIES)


def test_planning_md_lists_every_key_of_a_policy() -> None:
    rows = {
        row[0].strip("`"): row for row in table_rows(text("planning.md"), "### Keys of a policy")
    }
    assert list(rows) == [field.name for field in fields(OpenPolicy)]
    for field in fields(OpenPolicy):
        is_required = field.default is MISSING
        assert (rows[field.name][1] == "required") == is_required, field.name


def test_schedules_md_lists_every_trait_and_request() -> None:
    traits = [cell.strip("`") for cell in first_cells(text("schedules.md"), "## Traits")]
    assert traits == [field.name for field in fields(Traits)]
    requests = {cell.strip("`") for cell in first_cells(text("schedules.md"), "## Requests")}
    assert requests == {request.__name__ for request in get_args(Request)}


def test_architecture_md_lists_every_room() -> None:
    listed = " ".join(first_cells(text("architecture.md"), "## One staircase"))
    there = (path for path in (REPOSITORY / "moebatch").iterdir() if path.stem[0] != "_")
    rooms = {f"{path.name}/" if path.is_dir() else path.stem for path in there}
    assert set(re.findall(r"`([^`]+)`", listed)) == rooms - {"py"}


def test_schedules_md_lists_every_kind_of_task() -> None:
    listed = re.findall(r"`([^`]+)`", " ".join(first_cells(text("schedules.md"), "## Tasks")))
    assert sorted(listed) == sorted(Kind)


@pytest.mark.parametrize(
    ("folder", "heading"), [("hardware", "### Machines"), ("models", "### Models")]
)
def test_planning_md_lists_every_profile_and_shape(folder: str, heading: str) -> None:
    listed = [cell.strip("`") for cell in first_cells(text("planning.md"), heading)]
    there = [path.stem for path in (REPOSITORY / "policies" / folder).glob("*.yaml")]
    assert sorted(listed) == sorted(there)


def test_the_makefile_lists_all_its_targets() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    explained = set(re.findall(r"^([\w-]+):.*## \S", makefile, re.MULTILINE))
    assert targets == explained
    assert re.search(r"^([\w-]+):", makefile, re.MULTILINE)[1] == "help"  # type: ignore[index]


def _options() -> dict[str, set[str]]:
    """Long options of every command."""
    commands: Any = typer.main.get_command(app)
    return {
        name: {
            option for parameter in sub.params for option in parameter.opts if option[:2] == "--"
        }
        for name, sub in commands.commands.items()
    }


def test_every_command_and_option_is_explained_somewhere() -> None:
    said = "\n".join(page.read_text() for page in PAGES)
    for command, options in _options().items():
        assert f"moebatch {command}" in said, command
        for option in options - {"--help"}:
            assert re.search(rf"{option}\b", said), f"moebatch {command} {option}"


def _pages_and_commands() -> list[tuple[Path, str]]:
    return [
        (page, code)
        for page in PAGES
        for code in sorted(codes(page.read_text()))
        if code.startswith("moebatch ") and page.name != "CHANGELOG.md"
    ]


def test_commands_in_sentences_exist() -> None:
    options = _options()
    for page, code in _pages_and_commands():
        command, given = code.split()[1], re.findall(r"(?<=\s)--[\w-]+", code)
        assert command in options or command.startswith("-"), f"{page.name}: {code}"
        assert set(given) - {"--help", "--version"} <= options.get(command, set()), (
            f"{page.name}: {code}"
        )
