"""`moebatch plan` and `moebatch profile`, as a user types them."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from moebatch.errors import ExitCode
from tests.command import carried_out_without, moebatch

SAVED = "moe-lightning-t4-mtbench-128"
T4 = ("--hw", "t4", "--model", "mixtral-8x7b", "--prompt-len", "77", "--gen-len", "128")
LONG = ("--prompt-len", "9000", "--gen-len", "100")
PLANNED = (*T4, "--policy", SAVED)
"""Where it does not matter how the policy is found."""


@cache
def answer(*arguments: str) -> dict[str, dict[str, float]]:
    done = moebatch("plan", *arguments, "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return found


def test_the_answer_on_screen_has_what_a_person_asks_for() -> None:
    done = moebatch("plan", *T4, "--requests", "5000", COLUMNS="160")
    assert done.returncode == ExitCode.OK, done.stderr
    for part in (
        "Mixtral-8x7B on t4",
        "5000 sequences: prompts of 77 tokens, answers of up to 128",
        "prompt tok/s",
        "micro-batches of",
        "KV cache",
        "of 15.0 GiB",
        "binds",
        "P1 dram",
        "P2 dram",
        "what would help most",
    ):
        assert part in done.stdout, part
    assert not done.stdout.startswith("a plan only")
    assert "Traceback" not in done.stderr


def test_json_has_stable_keys() -> None:
    found = answer(*T4, "--requests", "5000")
    assert set(found["policy"]) == {
        *("batch_size", "micro_batch_size", "num_micro_batches", "attention_on_gpu"),
        *("ffn_on_gpu", "weights", "kv_cache", "schedule", "batching", "tokens_per_pass"),
        *("num_slots", "num_kv_pages", "num_hot", "cache", "cache_sizes", "predictor", "staging"),
        "streamed_layers",
    }
    assert set(found["prediction"]) == {
        *("decode_tokens_per_s", "prefill_tokens_per_s", "tokens_per_s", "layer_time_s"),
        *("bottleneck", "lanes_s", "peak_bytes", "capacity_bytes", "job_time_s", "num_passes"),
        *("launching_s", "waiting_s"),
    }
    for shares in (found["policy"]["weights"], found["policy"]["kv_cache"]):
        assert set(shares) == {"vram", "dram", "disk"}  # type: ignore[call-overload]
        assert sum(shares.values()) == pytest.approx(1)  # type: ignore[attr-defined]
    prediction = found["prediction"]
    seconds = 5000 * 128 / prediction["tokens_per_s"]
    assert prediction["job_time_s"] == pytest.approx(seconds, rel=0.01)
    assert 1 <= len(found["improvements"]) <= 3


def test_without_requests_there_is_no_job_time() -> None:
    assert answer(*T4)["prediction"]["job_time_s"] is None


def test_neither_torch_nor_transformers_nor_matplotlib_is_loaded() -> None:
    carried_out_without("torch transformers datasets matplotlib", "plan", *T4, "--json")


def test_paper_mode_gives_the_published_policy() -> None:
    found = answer("--hw", "t4-moe-lightning", *T4[2:], "--paper")
    policy = found["policy"]
    assert (policy["micro_batch_size"], policy["num_micro_batches"]) == (164, 14)
    assert found["prediction"]["decode_tokens_per_s"] == pytest.approx(445.6, rel=1e-3)


def test_what_if_changes_the_answer() -> None:
    before = answer(*T4)["prediction"]
    after = answer(*T4, "--what-if", "vram=60GiB", "--what-if", "vram.gemm=30TFLOP/s")
    assert after["prediction"]["tokens_per_s"] > 1.2 * before["tokens_per_s"]
    assert after["prediction"]["capacity_bytes"]["vram"] == 60 * 2**30  # type: ignore[index]


@pytest.mark.exhaustive
def test_what_a_packed_model_would_bring() -> None:
    before = answer(*T4, "--what-if", "dram=40GiB")
    (int4,) = (one for one in before["improvements"] if one["what_if"] == "weights=int4")  # type: ignore[index]
    after = answer(*T4, "--what-if", "dram=40GiB", "--what-if", "weights=int4")
    assert (before["weights"], after["weights"]) == ("float16", "packed int4, groups of 64")
    speedup = after["prediction"]["tokens_per_s"] / before["prediction"]["tokens_per_s"]
    assert speedup == pytest.approx(int4["speedup"], rel=0.03)  # type: ignore[index]
    unmeasured = "decoding of packed int4, groups of 64 on vram has not been measured"
    told = [any(unmeasured in note for note in found["notes"]) for found in (before, after)]
    assert told == [False, True]


def test_klotski_says_which_inequalities_hold() -> None:
    found = answer(*T4, "--method", "klotski")
    assert found["method"] == "klotski"
    notes = " ".join(found["notes"])
    for number in ("(4)", "(5)", "(6)", "(7)"):
        assert f"inequality {number}" in notes


def test_a_written_policy_can_be_predicted_again(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    first = answer(*T4, "--requests", "5000", "-o", str(path))
    content = yaml.safe_load(path.read_text())
    assert content["source"].startswith("moebatch ")
    assert content["policy"]["batch_size"] == first["policy"]["batch_size"]
    again = answer(*T4, "--requests", "5000", "--policy", str(path))
    assert again["method"] == "given"
    for key, value in first["policy"].items():
        assert again["policy"][key] == pytest.approx(value), key
    assert again["prediction"]["tokens_per_s"] == pytest.approx(
        first["prediction"]["tokens_per_s"], rel=1e-3
    )


def test_a_policy_that_does_not_fit_is_predicted_with_a_note() -> None:
    found = answer(*T4, "--policy", "moe-lightning-t4-synthetic", "--what-if", "dram=40GiB")
    assert any("does not fit: dram: the policy needs" in note for note in found["notes"])


def test_bars_are_printed_in_a_locale_that_has_none() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "moebatch", "plan", *PLANNED]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(rb"dram +#+\xb7* +[0-9]+%", done.stdout)


def test_a_picture_is_drawn_without_pyplot_and_its_global_state(tmp_path: Path) -> None:
    words = *PLANNED, "--json", "--roofline", tmp_path / "out.pdf"
    carried_out_without("matplotlib.pyplot", "plan", *words)


def test_the_roofline_is_an_svg_with_both_operations(tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    assert moebatch("plan", *PLANNED, "--roofline", str(path)).returncode == ExitCode.OK
    text = " ".join(ElementTree.parse(path).getroot().itertext())
    for part in ("Mixtral-8x7B on t4", "attention", "expert FFN", "P1", "P2"):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), r"--model: is missing; give a job file, or --model, --prompt-len and --gen-len"),
        (("job.yaml", "--model", "dbrx"), r"--model: not together with a job file"),
        (
            (*T4, "--weights", "int4", "--what-if", "weights=int8"),
            r"--what-if: weights is given 2 times \(--weights is one\); give one",
        ),
        (
            (*T4, "--what-if", "dram=64GiB", "--what-if", " dram = 32GiB"),
            r"--what-if: dram is given 2 times; give one",
        ),
        (
            (*T4, "--what-if", "dram=64GiB", "--what-if", "dram.capacity=32GiB"),
            r"--what-if: dram is given 2 times; give one",
        ),
        ((*T4, "--paper", "--vendor"), r"--vendor: not together with --paper"),
        (
            (*T4, "--kv-cache", "full4", "--method", "lp"),
            r"--kv-cache: must be one of full, int8, fp8, got 'full4' "
            r"moebatch plan: --method: must be one of milp, klotski, got 'lp'",
        ),
        ((*T4, "--what-if", "dram=-3GiB"), r"--what-if: dram: "),
        ((*T4, "--what-if", "dram=nan"), r"--what-if: dram: "),
        (
            (*T4, "--what-if", "ram=3GiB"),
            r"has no figure 'ram'; write .* did you mean vram or dram\? 'list' in its place shows",
        ),
        ((*T4, "--policy", "nonsense"), r"no policy of that name"),
        (
            ("--hw", "t5", *T4[2:]),
            r"no hardware profile of that name; give the path of a file, or one of 2xt4, .* t4,",
        ),
        ((*T4[:2], "--model", "mixtral", *T4[4:]), r"no model shape of that name"),
        (
            (*T4[:2], "--model", "mistralai/Mixtral-8x7B-v0.1", *T4[4:]),
            r"Mixtral-8x7B-v0.1: no such file or folder; did you mean mixtral-8x7b\?$",
        ),
        ((*T4, "--paper", "--hw", "generic-cpu"), r"GPU"),
        (
            ("--hw", "generic-cpu", *T4[2:], "--policy", "moe-lightning-t4-synthetic"),
            r"policy.ffn_on_gpu: there is no GPU; set it to false",
        ),
    ],
)
def test_mistakes_get_one_clear_message(arguments: tuple[str, ...], message: str) -> None:
    done = moebatch("plan", *arguments)
    assert done.returncode == ExitCode.CONFIG
    assert re.search(message, " ".join(done.stderr.split())), done.stderr
    assert "Traceback" not in done.stderr


def test_what_does_not_fit_names_level_need_have_and_knob() -> None:
    done = moebatch("plan", *T4, "--what-if", "vram=2GiB")
    assert done.returncode == ExitCode.DOES_NOT_FIT
    assert re.search(r"vram: needs .* at the least, has 2.00 GiB", done.stderr)
    smallest = re.search(r"--what-if (vram=\d+MiB)", done.stderr)
    assert smallest is not None
    assert moebatch("plan", *T4, "--what-if", smallest[1]).returncode == ExitCode.OK


def test_a_level_that_is_filled_on_purpose_is_none_that_is_too_small() -> None:
    asked = ("--hw", "l4", "--model", "deepseek-v3", "--prompt-len", "17", "--gen-len", "2000")
    done = moebatch("plan", *asked, "--requests", "10", "--what-if", "vram=5GiB")
    assert done.returncode == ExitCode.DOES_NOT_FIT
    assert "vram: needs" in done.stderr
    assert done.stderr.count("at the least") == 1


def test_an_output_that_cannot_be_written_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for option, name in (("-o", "a.yaml"), ("--roofline", "a.svg")):
        done = moebatch("plan", *PLANNED, option, str(tmp_path / "file" / name))
        assert done.returncode == ExitCode.STORAGE
        told = f"{name}: cannot be written: {tmp_path / 'file'} is no folder; give another place"
        assert told in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_folders_of_an_output_are_made(tmp_path: Path) -> None:
    policy, roofline = tmp_path / "new" / "policy.yaml", tmp_path / "more" / "new" / "roof.svg"
    done = moebatch("plan", *PLANNED, "-o", str(policy), "--roofline", str(roofline))
    assert done.returncode == ExitCode.OK, done.stderr
    assert policy.is_file() and roofline.is_file()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("capacity: {achieved: .nan}", r"levels\.dram\.capacity\.achieved"),
        ("capacity: {achieved: 0GiB}", r"levels\.dram\.capacity\.achieved"),
        ("capacity: {achieved: -4GiB}", r"levels\.dram\.capacity\.achieved"),
        ("capacity: {achieved: 4000000TiB}", r"levels\.dram\.capacity\.achieved"),
        ("capacity: {achieve: 4GiB}", r"levels\.dram\.capacity\.achieve: .*achieved"),
    ],
)
def test_senseless_profiles_are_refused_with_line_and_path(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        "name: mine\nsource: test\nlevels:\n  dram:\n"
        f"    {line}\n"
        "    bandwidth: {achieved: 20GB/s}\n"
        "    gemm: {float32: {achieved: 1TFLOP/s}}\n"
    )
    done = moebatch("plan", "--hw", str(path), *T4[2:])
    assert done.returncode == ExitCode.CONFIG
    assert re.search(rf"my\.yaml:5: {message}", done.stderr), done.stderr


def test_a_half_filled_profile_is_refused_with_all_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("name: mine\nsource: test\nlevels:\n  vram:\n    capacity: {peak: 16GB}\n")
    done = moebatch("plan", "--hw", str(path), *T4[2:])
    assert done.returncode == ExitCode.CONFIG
    for part in ("needs dram", "levels.vram.bandwidth", "levels.vram.gemm", "dram->vram"):
        assert part in done.stderr, part


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            (*T4[:4], "--prompt-len", "40000", "--gen-len", "128", "--policy", SAVED),
            "40128 tokens do not fit into the model's context of 32768",
        ),
        ((*T4, "--policy", "flexgen-t4-mtbench-128"), "static batches are for comparison"),
        (
            ("--hw", "generic-cpu", "--model", "switch-base-8", *LONG),
            "prompts are encoded whole, at most 512 tokens",
        ),
    ],
)
def test_the_first_line_says_of_what_no_run_does_that_it_is_a_plan_only(
    arguments: tuple[str, ...], reason: str
) -> None:
    done = moebatch("plan", *arguments, COLUMNS="200")
    assert done.stdout.startswith("a plan only: "), done.stderr
    assert reason in done.stdout.splitlines()[0]


def test_a_policy_that_was_made_for_others_says_so() -> None:
    found = answer("--hw", "l4", "--model", "olmoe-1b-7b", *T4[4:], "--policy", SAVED)
    assert "the policy was made for t4-moe-lightning, not for l4" in found["notes"]
    assert any("the policy was made for mixtral-8x7b, not for" in note for note in found["notes"])
    assert not any(
        "made for" in note
        for note in answer("--hw", "t4-moe-lightning", *T4[2:], "--policy", SAVED)["notes"]
    )


@pytest.mark.parametrize(
    "command, same",
    [
        (
            ("sbatch", "job.yaml", "--shards", "2", "-o", "./job.yaml"),
            "--output: is the same as JOB",
        ),
        (("plan", "job.yaml", "-o", "link.yaml"), "--output: is the same as JOB"),
        (("plan", *T4, "--hw", "./hw.yaml", "-o", "hw.yaml"), "--output: is the same as --hw"),
        (
            ("plan", *T4, "--roofline", "a.svg", "-o", "a.svg"),
            "--roofline: is the same as --output",
        ),
        (
            ("simulate", *T4, "--durations", "s.json", "--trace", "s.json"),
            "--trace: is the same as --durations",
        ),
        (("run", "s.json", "--trace", "s.json"), "--trace: is the same as JOB"),
    ],
)
def test_nothing_is_written_over_what_the_command_reads_or_writes(
    tmp_path: Path, command: tuple[str, ...], same: str
) -> None:
    read = ("job.yaml", "hw.yaml", "s.json")
    for name in read:
        (tmp_path / name).write_text("{}")
    (tmp_path / "link.yaml").symlink_to("job.yaml")
    line = [sys.executable, "-m", "moebatch", *command]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == ExitCode.CONFIG
    assert f"{same}; choose another" in done.stderr
    assert [(tmp_path / name).read_text() for name in read] == ["{}"] * len(read)
