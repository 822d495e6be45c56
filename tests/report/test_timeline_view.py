"""Tables of timelines: seconds per pass, shares, and waits in words."""

import re

import pytest
from rich.console import Console, RenderableType

from moebatch.plan.simulation.simulation import Simulation
from moebatch.report.task_names import bubble_text, seconds_text, task_text, wait_text
from moebatch.report.timeline_view import simulation_view, waits_table
from moebatch.schedule.task import Kind, Task
from moebatch.schedule.timeline.statistics import Statistics
from moebatch.schedule.timeline.timeline import Bubble, Timeline
from moebatch.spec.policy.policy import Placement, Policy
from tests.report.timelines import cgopipe, expert_major

POLICY = Policy(
    batch_size=1,
    micro_batch_size=1,
    tokens_per_pass=1,
    num_slots=2,
    num_kv_pages=1,
    weights=Placement(dram=1.0),
)


def shown(view: RenderableType, width: int = 110) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def simulated(timelines: dict[str, Timeline], tokens_per_pass: float = 0.0) -> str:
    found = {
        name: Simulation(
            policy=POLICY, timeline=timeline, tokens_per_pass=tokens_per_pass, work="decode"
        )
        for name, timeline in timelines.items()
    }
    return shown(simulation_view(found))


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


def test_a_schedule_shows_its_steady_pass_and_lanes() -> None:
    timeline = expert_major(num_passes=3)
    text = simulated({"klotski": timeline}, 512)
    assert text.startswith("klotski\n")
    assert f"1.60 s, {512 / timeline.steady_pass_s:.4g} tok/s" in line_of(text, "per pass")
    assert re.search(r"█+·+\s+70%\s+idle 480 ms", line_of(text, "cpu"))
    assert "20.0 ms before expert 1 of layer 0: its transfer" in text


def test_idle_time_is_that_of_one_pass() -> None:
    texts = [simulated({"x": expert_major(num_passes=n)}) for n in (2, 6)]
    assert "idle 480 ms" in line_of(texts[0], "cpu")
    assert "idle 480 ms" in line_of(texts[1], "cpu")


def test_without_bubbles_there_are_no_longest_ones() -> None:
    text = simulated({"x": expert_major(num_passes=3, compute_s=0.1)})
    assert "100%" in line_of(text, "cpu")
    assert "longest" not in text


def test_one_schedule_is_not_compared() -> None:
    assert "ratio" not in simulated({"klotski": expert_major()})


def test_schedules_are_compared_with_the_first() -> None:
    timelines = {"klotski": expert_major(), "simple": expert_major(load_s=0.1), "cg": cgopipe()}
    text = simulated(timelines)
    text = text[text.index("schedule ") :]
    assert re.search(r"1\.60 s\s+1\.00\s+disk->dram 99%\s+nothing", line_of(text, "klotski"))
    assert re.search(r"3\.20 s\s+2\.00\s+disk->dram", line_of(text, "simple"))
    assert "gpu 90%" in line_of(text, "cg")
    assert "results of attention on their way up, 2.00 s" in line_of(text, "cg")


def test_waits_are_added_up_and_the_longest_named() -> None:
    text = shown(waits_table(Statistics.of(expert_major())))
    assert "waited 1.67 s for experts on their way" in line_of(text, "cpu")
    assert "waited 200 ms for work to be launched" in line_of(text, "disk->dram")
    assert "cpu 230 ms before expert 0 of layer 0: its transfer" in line_of(text, "longest waits")


def test_waits_of_lanes_that_do_not_matter_are_not_among_the_longest() -> None:
    text = shown(waits_table(Statistics.of(cgopipe())))
    longest = text[text.index("longest waits") :]
    assert "gpu 1.50 s" in longest
    assert "vram->dram" not in longest


def test_a_job_that_did_nothing_can_be_shown() -> None:
    assert not shown(waits_table(Statistics(num_layers=1))).strip()
    nothing = Timeline(num_layers=1, pass_ends_s=(), spans=())
    assert "0 s" in simulated({"x": nothing})


def test_every_kind_has_words() -> None:
    assert len({wait_text(kind) for kind in Kind}) == len(Kind)
    assert wait_text("attn") == "attention on the CPU"
    assert wait_text("a new reason") == "a new reason"
    for kind in Kind:
        assert task_text(Task(kind, 13), 10).endswith(" of layer 3")


@pytest.mark.parametrize(
    ("before", "waited_for", "words"),
    [
        (
            Task(Kind.EXPERT, 13, expert=5),
            "chunk(13, e5, part2)",
            "before expert 5 of layer 3: its transfer",
        ),
        (
            Task(Kind.CHUNK, 14, expert=1),
            "expert(13, e5)",
            "before transfer of expert 1 of layer 4: expert 5 of layer 3",
        ),
        (
            Task(Kind.EXPERT, 13, expert=5),
            "gate(13, k2)",
            "before expert 5 of layer 3: gate of micro-batch 2 in layer 3",
        ),
        (
            Task(Kind.LOAD, 13, 1),
            "attn(13, k1)",
            "before attention results of micro-batch 1 in layer 3: its CPU attention",
        ),
        (
            Task(Kind.PAGE, 13, page=2),
            "stage(13, p2)",
            "before transfer of page 2 of layer 3: its staging",
        ),
        (
            Task(Kind.PAGE, 13, page=2),
            "launch",
            "before transfer of page 2 of layer 3: it had not been launched",
        ),
        (Task(Kind.COMBINE, 13), "a storm", "before sum over experts of layer 3: a storm"),
    ],
)
def test_waits_in_words(before: Task, waited_for: str, words: str) -> None:
    assert bubble_text(Bubble("cpu", 0, 1, before, waited_for), 10) == words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (12e-6, "12 µs"),
        (1.5e-3, "1.50 ms"),
        (0.0796, "79.6 ms"),
        (0.9996, "1.00 s"),
        (1.044, "1.04 s"),
        (9.996, "10.0 s"),
        (20.0, "20.0 s"),
        (1234.0, "1234 s"),
    ],
)
def test_seconds_have_three_figures(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_names_are_no_markup() -> None:
    text = simulated({"[red]": cgopipe(), "[/]": cgopipe()})
    assert "[red]" in text
    assert "[/]" in text
