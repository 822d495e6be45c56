"""What holds for every file that is read as a form."""

import subprocess
import sys
from pathlib import Path

import pytest

from moebatch.errors import ConfigError
from moebatch.spec.files.form import Form, read_form
from moebatch.spec.files.values import Line, Threads

ROOT = Path(__file__).parents[2]


class Inner(Form):
    threads: Threads = None
    name: Line


class Outer(Form):
    inner: Inner
    flag: bool = False


def messages(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_form(path, Outer, kind="test file")
    return [str(fault).removeprefix(f"{path}:") for fault in caught.value.faults]


def test_all_faults_stand_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "flag: 1\ninner:\n  nam: x\n  threads: many\nthreads: 3\n"
    assert messages(tmp_path, text) == [
        "1: flag: must be true or false, got 1",
        "2: inner.name: is missing and has no default",
        "3: inner.nam: unknown key; did you mean inner.name?",
        "4: inner.threads: must be auto or a whole number from 1 to 4096, got 'many'",
        "5: threads: unknown key; did you mean inner.threads?",
    ]


def test_a_mapping_that_is_missing_or_none_is_met_with_its_keys(tmp_path: Path) -> None:
    assert messages(tmp_path, "flag: true\n") == [" inner: is missing; add it with name"]
    assert messages(tmp_path, "inner: 3\n") == [
        "1: inner: must be a mapping with keys of its own (threads, name), got 3"
    ]


def test_a_value_that_yaml_cannot_read_is_one_fault(tmp_path: Path) -> None:
    assert messages(tmp_path, "inner: {name: !!int x}\n") == [
        "1: inner.name: cannot be read as int"
    ]


def test_a_merge_key_is_refused_and_not_taken_for_a_key(tmp_path: Path) -> None:
    text = "flag: true\ninner:\n  <<: {threads: 2}\n  name: x\n"
    assert messages(tmp_path, text) == [
        "3: inner.<<: merge keys are not read here; write out the keys"
    ]


def test_commands_start_without_what_reads_files() -> None:
    code = (
        "import sys, moebatch.cli.commands ; sys.exit(bool({'pydantic', 'yaml'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
