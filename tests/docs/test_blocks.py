"""What a reader types does what the page says."""

from pathlib import Path

import pytest

from moebatch.spec.files.yaml_file import read_yaml
from moebatch.spec.job import Job
from tests.docs.console import commands, faults_of_page, matches, prepare
from tests.docs.pages import PAGES, RUNNABLE, Block, anchors, blocks, links
from tests.native import load_chosen

_WITH_COMMANDS = [
    page
    for page in PAGES
    if any(b.language in RUNNABLE and b.not_run is None for b in blocks(page.read_text()))
]


@pytest.mark.few(2)
@pytest.mark.parametrize("page", _WITH_COMMANDS, ids=lambda page: page.stem)
def test_commands_do_what_the_page_says(page: Path, tmp_path: Path) -> None:
    load_chosen()  # commands that have to compile say so
    prepare(tmp_path)
    faults = list(faults_of_page(blocks(page.read_text()), tmp_path))
    assert not faults, "\n".join([*faults, "after a look at each: `make docs` puts outputs in"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in blocks(page.read_text()):
        assert block.language, f"{page.name}:{block.line}: a block without a language"
        assert block.language not in ("sh", "bash", "shell"), (
            f"{page.name}:{block.line}: commands stand in console blocks, behind `$ `"
        )
        for number, line in enumerate(block.lines, start=block.line):
            assert block.language == "console" or not line.startswith("$ "), (
                f"{page.name}:{number}: a command outside a console block is never run"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_of_job_files_in_blocks_exist(page: Path, tmp_path: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language == "yaml" and block.file_name is None:  # files are used by commands
            _check_keys(block, tmp_path / "block.yaml", page.name)


def _check_keys(block: Block, file: Path, page: str) -> None:
    file.write_text("\n".join(block.lines))
    content = read_yaml(file, kind="block").content
    if not isinstance(content, dict) or not set(content) & set(Job.model_fields):
        return  # a policy or a profile
    for section, keys in content.items():
        assert section in Job.model_fields, f"{page}:{block.line}: no section {section}"
        known = Job.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
        assert set(keys) <= set(known), f"{page}:{block.line}: {set(keys) - set(known)}"


class TestComparison:
    def test_figures_bars_and_blanks_may_differ(self) -> None:
        shown = ["vram  ████······ 41%  6.2 GiB of 15.0 GiB", "job   1h07m, 1,234.5 tok/s"]
        output = "vram ██████████···  100% 14.9 GiB  of 15.0 GiB\njob 52m, 9 tok/s"
        assert matches(shown, output)

    @pytest.mark.parametrize("output", ["dram  4 GiB", "vram  4 GiB free", "vram", ""])
    def test_words_may_not(self, output: str) -> None:
        assert not matches(["vram  4 GiB"], output)

    def test_dots_stand_for_what_is_left_out(self) -> None:
        assert matches(["first", "…", "last … 3"], "first\nx\ny\nlast one of 4")
        assert matches(["first", "…"], "first")
        assert not matches(["…", "last"], "last\nbut one")

    def test_a_command_shown_without_output_may_print_anything(self) -> None:
        assert matches([], "x")


class TestPages:
    def test_a_comment_before_a_block_says_why_it_is_not_run_or_what_file_it_is(self) -> None:
        page = "<!-- not run: no cluster -->\n\n```console\n$ x\n```\n\n```yaml\n# job.yaml\n```\n"
        page += "<!-- file: rows.jsonl -->\n```json\n{}\n```\n"
        cluster, job, rows = blocks(page)
        assert cluster.not_run == "no cluster"
        assert job.not_run is None
        assert (cluster.file_name, job.file_name, rows.file_name) == (
            None,
            "job.yaml",
            "rows.jsonl",
        )

    def test_commands_continue_behind_a_backslash(self) -> None:
        (block,) = blocks("```console\n$ one \\\n    --two\nout\n$ three\n```\n")
        first, second = commands(block)
        assert (first.words, first.expected, first.num_lines) == ("one --two", ["out"], 2)
        assert (second.words, second.line) == ("three", 5)

    def test_links_in_code_are_none_and_headings_are_anchors(self) -> None:
        page = "# One `two`, three\n[a](b.md#c) `[d](e)`\n```text\n# no heading [f](g)\n```\n"
        assert links(page) == ["b.md#c"]
        assert anchors(page) == {"one-two-three"}
