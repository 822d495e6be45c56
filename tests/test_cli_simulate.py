"""`moebatch simulate`, as a user types it."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from moebatch.errors import ExitCode
from moebatch.predict.trace import RoutingTrace
from tests.command import carried_out_without
from tests.plan.problems import MIXTRAL
from tests.test_cli_plan import T4, moebatch

LAYERS = 6
Few = tuple[str, ...]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Few:
    """Of a model with few layers, and a policy that needs no planning."""
    folder = tmp_path_factory.mktemp("models") / "few-layers"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**MIXTRAL, "num_hidden_layers": LAYERS}))
    lengths = ("--prompt-len", "77", "--gen-len", "128")
    policy = ("--policy", "flexgen-t4-mtbench-128-batch-504")
    return ("--hw", "t4", "--model", str(folder), *lengths, *policy)


def simulated(*arguments: str) -> dict[str, Any]:
    done = moebatch("simulate", *arguments, "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_screen_shows_each_schedule_and_how_they_compare(few: Few) -> None:
    done = moebatch("simulate", *few, "--schedule", "cgopipe", "--compare", "multi,hot")
    assert done.returncode == ExitCode.OK, done.stderr
    for part in (
        "few-layers on t4",
        "per pass",
        "tok/s",
        "longest bubbles",
        "which waits for",
        "staging",
        "cgopipe",
        "multi",
        "hot",
    ):
        assert part in done.stdout, part
    assert "Traceback" not in done.stderr


def test_json_has_stable_keys(few: Few) -> None:
    found = simulated(*few, "--requests", "5000", "--passes", "2")
    assert set(found) == {"model", "hardware", "schedules", "notes"}
    (one,) = found["schedules"].values()
    assert {"policy", "tokens_per_s", "tokens_per_pass", "pass_s", "lanes", "bottleneck"} <= set(
        one
    )
    assert len(one["pass_s"]) == 2
    assert one["tokens_per_s"] == pytest.approx(one["tokens_per_pass"] / one["steady_pass_s"])


def test_a_schedule_attends_where_its_paper_says(few: Few) -> None:
    found = simulated(*few, "--compare", "cgopipe,flexgen_c,flexgen")["schedules"]
    assert list(found) == ["flexgen", "cgopipe", "flexgen_c"]
    assert [one["policy"]["attention_on_gpu"] for one in found.values()] == [True, False, False]
    assert found["cgopipe"]["steady_pass_s"] < found["flexgen"]["steady_pass_s"]


def test_few_slots_are_told(few: Few) -> None:
    found = simulated(*few, "--compare", "multi")["schedules"]
    assert any("multi wants 16 slots" in note for note in found["multi"]["notes"])


def test_other_slots_are_taken_and_told_if_they_do_not_fit(few: Few) -> None:
    found = simulated(*few, "--schedule", "multi", "--slots", "48")["schedules"]["multi"]
    assert found["policy"]["num_slots"] == 48
    assert any("with 48 slots the policy does not fit: vram" in note for note in found["notes"])


def test_pictures_and_traces_are_written(few: Few, tmp_path: Path) -> None:
    trace, gantt = tmp_path / "new" / "out.json", tmp_path / "other" / "new" / "out.svg"
    done = moebatch("simulate", *few, "--passes", "1", "--trace", str(trace), "--gantt", str(gantt))
    assert done.returncode == ExitCode.OK, done.stderr
    assert json.loads(trace.read_text())["traceEvents"]
    assert "few-layers on t4" in " ".join(ElementTree.parse(gantt).getroot().itertext())


def test_durations_of_a_table_replace_those_of_the_cost_model(few: Few, tmp_path: Path) -> None:
    table = tmp_path / "d.yaml"
    table.write_text("block: 1.0\n")
    found = simulated(*few, "--durations", str(table))["schedules"]["flexgen"]
    assert found["lanes"]["weight block"]["busy_s"] == pytest.approx(2 * LAYERS, rel=0.05)


def test_routing_may_come_from_a_trace(few: Few, tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    chosen = np.tile(np.array([3, 5]), (LAYERS, 10, 1))
    RoutingTrace.of([chosen], range(LAYERS), num_experts=8).save(path)
    found = simulated(*few, "--schedule", "klotski", "--routing", str(path))
    lanes = found["schedules"]["klotski"]["lanes"]
    even = simulated(*few, "--schedule", "klotski")["schedules"]["klotski"]["lanes"]
    assert lanes["dram->vram"]["busy_s"] < 0.7 * even["dram->vram"]["busy_s"]


def test_neither_torch_nor_transformers_nor_matplotlib_is_loaded(few: Few) -> None:
    carried_out_without(
        "torch transformers datasets matplotlib", "simulate", *few, "--passes", "1", "--json"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), r"moebatch simulate: --model: is missing"),
        (
            (*T4, "--schedule", "klotsky"),
            r"--schedule: no schedule is named 'klotsky'; did you mean klotski",
        ),
        ((*T4, "--compare", "hot,cold"), r"--compare: no schedule is named 'cold'"),
        ((*T4, "--durations", "nowhere.yaml"), r"nowhere.yaml"),
        ((*T4, "--routing", "nowhere.safetensors"), r"nowhere.safetensors"),
        ((*T4, "--policy", "nonsense"), r"no policy of that name"),
    ],
)
def test_mistakes_get_one_clear_message(arguments: tuple[str, ...], message: str) -> None:
    done = moebatch("simulate", *arguments)
    assert done.returncode not in (ExitCode.OK, 1), done.stdout
    assert re.search(message, " ".join(done.stderr.split())), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [None, b"", b"prompt: 5\n" * 9])
def test_what_is_no_trace_is_a_mistake_in_the_command(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "trace.safetensors"
    if content is not None:
        path.write_bytes(content)
    done = moebatch("simulate", *T4, "--routing", str(path))
    assert done.returncode == ExitCode.CONFIG
    assert done.stderr.startswith(f"error: --routing: {path}: ")
    assert "record one by `moebatch calibrate --trace`" in " ".join(done.stderr.split())


def test_a_trace_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.safetensors"
    RoutingTrace.of([np.zeros((2, 3, 1), int)], range(2), num_experts=4).save(path)
    done = moebatch("simulate", *T4, "--routing", str(path))
    assert done.returncode == ExitCode.CONFIG
    assert "is of a model with 2 layers of 4 experts" in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_programs_read_what_ended_a_command(command: str, tmp_path: Path) -> None:
    done = moebatch(command, tmp_path / "no job.yaml", "--json")
    told = json.loads(done.stdout)
    assert told["exit_code"] == done.returncode == ExitCode.CONFIG
    assert "no such file" in told["error"]


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_experts_on_the_cpu_beside_a_gpu_are_refused(command: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("policy: {batch_size: 8, micro_batch_size: 8, weights: {dram: 1}}\n")
    done = moebatch(command, *T4, "--policy", str(path))
    assert done.returncode == ExitCode.CONFIG
    assert "policy.ffn_on_gpu: experts are computed on the GPU where there is one" in done.stderr
    assert "num_slots" not in done.stderr


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([4] * 3, "are 3, the model has 32 layers with experts"),
        ([9, 7] * 16, "must be at most 8, the experts of a layer, got 9"),
        ([3] * 32, "sum to 96, the weights that stay are 128 experts"),
    ],
)
def test_sizes_that_are_not_those_of_a_cache_are_refused(
    command: str, sizes: list[int], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "policy: {batch_size: 8, micro_batch_size: 8, weights: {vram: 0.5, dram: 0.5}, "
        f"ffn_on_gpu: true, cache: lru, cache_sizes: {sizes}}}\n"
    )
    done = moebatch(command, *T4, "--policy", str(path))
    assert done.returncode == ExitCode.CONFIG
    assert f"policy.cache_sizes: {message}" in done.stderr
