"""Schedules in files of the user's own."""

import json
from pathlib import Path

import pytest

from moebatch.errors import ConfigError, Interrupted
from moebatch.schedule.drivers.emission import launched
from moebatch.schedule.registry import find_schedule, unknown_schedule
from tests.test_cli_plan import T4, moebatch

FILE = Path(__file__).with_name("own_schedule.py")
MINE = f"{FILE}:mine"


@pytest.mark.exhaustive
def test_it_is_simulated_beside_others_and_planned_with() -> None:
    done = moebatch("simulate", *T4, "--schedule", MINE, "--compare", "klotski", "--json")
    assert list(json.loads(done.stdout)["schedules"]) == [MINE, "klotski"], done.stderr
    done = moebatch("plan", *T4, "--schedule", MINE, "--json")
    assert json.loads(done.stdout)["policy"]["schedule"] == MINE, done.stderr


def test_its_decorator_says_what_it_is_like() -> None:
    traits = find_schedule(MINE).traits
    assert (traits.moves, traits.runs, traits.foresees) == ("experts", "pass", "likely")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("", "has no schedule 'mine'"),
        ("mine = 3", "has no schedule 'mine'"),
        ("from moebatch.schedule.klotski import hot", "has no schedule 'mine'; it has hot"),
        ("def mine(layer", "line 1"),
        ("\nimport no_such_module\n", "line 2.*no_such_module"),
        ("def __getattr__(name):\n    raise ValueError(name)", "line 2: ValueError: mine"),
    ],
)
def test_a_file_without_it_says_why(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        find_schedule(f"{path}:mine")
    assert len(unknown_schedule(f"{path}:mine")) == 1


def test_the_line_is_named_of_a_file_in_the_folder_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("beside.py").write_text("\nimport no_such_module\n")
    with pytest.raises(ConfigError, match=r"line 2.*no_such_module"):
        find_schedule("beside.py:mine")


def test_what_a_line_of_it_raises_is_a_fault_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE.read_text().replace("yield combine(i)", "yield combine(i / 0)"))
    line = path.read_text()[: path.read_text().index("i / 0")].count("\n") + 1
    done = moebatch("simulate", *T4, "--schedule", f"{path}:mine")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"line {line}: " in done.stderr and "ZeroDivisionError" in done.stderr


def test_what_it_prints_is_no_part_of_the_json(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    printing = FILE.read_text().replace(
        "    yield combine(i)", "    print(i)\n    yield combine(i)"
    )
    path.write_text(f"{printing}\nprint('loaded')\n")
    done = moebatch("simulate", *T4, "--passes", 1, "--schedule", f"{path}:mine", "--json")
    assert list(json.loads(done.stdout)["schedules"]) == [f"{path}:mine"], done.stderr
    assert done.stderr.startswith("loaded\n") and "\n31\n" in done.stderr


def test_its_file_may_have_dataclasses_with_annotations_of_any_kind(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    own = "@dataclass\nclass Order:\n    depth: int = 1\n"
    begins = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    path.write_text(f"{begins}{FILE.read_text()}\n{own}")
    assert find_schedule(f"{path}:mine").name == "mine"


NOT_TO_BE_DONE = {
    "an expert twice": ("yield expert(i, e)", "yield expert(i, e); yield expert(i, e)", "twice"),
    "experts left out": ("for e in chosen:", "for e in list(chosen)[:1]:", "comes before 1 expert"),
    "a gate before attention": (
        "yield from attention.of(k)",
        "yield gate(i, k); yield from attention.of(k)",
        "before the attention",
    ),
    "attention left out of later layers": (
        "attention.of(k)",
        "attention.of(k) if i == 0 else ()",
        "1, k0",
    ),
    "combine left out": ("yield combine(i)", "pass", "has not been through layer 0"),
    "no route": ("yield Route(i, k)", "pass", "comes before Route"),
    "a route left out": ("yield Route(i, k)", "yield Route(i, 0)", r"comes before Route\(0, 1\)"),
    "a route before its gate": ("yield Route(i, k)", "yield Route(i + 1, k)", "comes before gate"),
    "an expert that none chose": ("expert(i, e)", "expert(i, e + 9)", "expert 9 is none"),
    "no such micro-batch": ("yield combine(i)", "yield gate(i, 9)", "4 micro-batches"),
    "a layer for a step": (
        "i, attention = layer.step",
        "i, attention = layer.step % 2",
        "of this pass",
    ),
    "no task": ("yield combine(i)", "yield 3", "neither a task nor a request"),
    "a wait for what never began": (
        "combine(i)",
        "combine(i, expert(i, 9))",
        r"waits for expert\(0, e9\)",
    ),
    "pages": (
        "yield combine(i)",
        "from moebatch.schedule.task import page; yield page(i, 0)",
        "moves",
    ),
    "half an expert": ("yield CancelPrefetch(i)", "yield Prefetch(i, 0.5)", "0.5 experts"),
    "a wait for a list": (
        "combine(i)",
        "combine(i, [gate(i, 0)])",
        r"combine\(0\) waits for \[.*no task",
    ),
    "what cannot be shown": (
        "yield combine(i)",
        "yield type('Mute', (), {'__repr__': lambda self: 1 / 0})()",
        "yielded a Mute",
    ),
    "requests without end": (
        "yield combine(i)",
        "while True: yield CancelPrefetch(i)",
        r"yielded \d+ tasks and requests in a row",
    ),
    "transfers without end": (
        "yield combine(i)",
        "from moebatch.schedule.task import Kind, Task\n"
        "    for p in range(10**9): yield Task(Kind.KV_UP, i, 0, page=p)",
        r"yielded \d+ tasks and requests in a row",
    ),
    "an exit": ("yield combine(i)", "raise SystemExit(0)", "SystemExit"),
    "the end of generators": ("yield combine(i)", "raise GeneratorExit", "GeneratorExit$"),
    "the end of iterators": ("yield combine(i)", "next(iter(()))", "raised StopIteration"),
    "an error of any kind": ("yield combine(i)", "raise BaseException", "BaseException$"),
    "an error that says nothing": (
        "yield combine(i)",
        "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})",
        "Mute$",
    ),
    "an end that goes wrong": (
        "yield combine(i)",
        "try: yield 3\n    finally: 1 / 0",
        "neither a task nor a request",
    ),
    "what a library raises": (
        "yield combine(i)",
        "import json; json.loads('{')",
        "JSONDecodeError",
    ),
    "a wrong call of ours": ("yield combine(i)", "yield combine()", "TypeError"),
}
"""What to change in the schedule, and what is said of it."""


@pytest.mark.parametrize("name", NOT_TO_BE_DONE)
def test_what_cannot_be_done_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    what, instead, message = NOT_TO_BE_DONE[name]
    path, whole = tmp_path / "mine.py", FILE.read_text()
    assert what in whole
    path.write_text(whole.replace(what, instead).replace("import Arr", "import Prefetch, Arr"))
    with pytest.raises(ConfigError, match=rf", line \d+: .*{message}"):
        launched(f"{path}:mine", "dram", "dram", attends_on_cpu=False)


def test_ctrl_c_names_the_line_at_work(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FILE.read_text().replace("yield combine(i)", "raise KeyboardInterrupt"))
    with pytest.raises(Interrupted, match=r", line \d+: KeyboardInterrupt"):
        launched(f"{path}:mine", "dram", "dram", attends_on_cpu=False)
    path.write_text("raise KeyboardInterrupt")
    with pytest.raises(Interrupted, match=", line 1: KeyboardInterrupt"):
        find_schedule(f"{path}:other")


def test_attention_above_keys_and_values_has_to_bring_and_store_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    whole = FILE.read_text().replace("import combine", "import attend, combine")
    path.write_text(whole.replace("yield from attention.of(k)", "yield attend(i, k)"))
    launched(f"{path}:mine", "vram", "vram", attends_on_cpu=False)
    with pytest.raises(ConfigError, match=r"line \d+: attend\(0, k0\) comes before kv up"):
        launched(f"{path}:mine", "vram", "dram", attends_on_cpu=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('@schedule(runs="always", foresees="likely")\ndef mine(layer): yield', "line 4.*always"),
        ("@job_schedule({})\ndef mine(setup): yield", "line 4.*takes Traits"),
        ('@schedule(runs="pass", foresees="likely")\ndef mine(layer): pass', "returned null"),
        ("@job_schedule(Traits())\ndef mine(setup): return [1]", "returned "),
        ("@job_schedule(Traits())\ndef mine(setup): yield NextPass()", "ended before the job"),
        ("raise SystemExit(0)", "line 4: SystemExit"),
    ],
)
def test_what_is_no_schedule_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mine.py"
    names = "NextPass", "Traits, job_schedule, schedule"
    begins = (
        f"from moebatch.schedule.{room} import {name}\n"
        for room, name in zip(("request", "definition"), names, strict=True)
    )
    path.write_text("\n" + "".join(begins) + content)
    with pytest.raises(ConfigError, match=message):
        launched(f"{path}:mine", "dram", "dram", attends_on_cpu=False)
