"""The command line as users, cron and Slurm meet it: screens, exit codes, nothing lost."""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from moebatch.cli import app
from moebatch.cli.process import explaining_refusals
from moebatch.errors import ExitCode, MoebatchError, OutOfMemory, StorageError
from moebatch.measure import machine
from moebatch.periodic import periodically
from tests.command import carried_out_without, moebatch
from tests.patience import PATIENCE_S, until

Checkpoint = Callable[..., Path]


OWN = Path(__file__).parent / "schedule" / "own_schedule.py"


def write_job(folder: Path, model: Path, rows: list[object] | bytes, **sections: object) -> Path:
    """A job file with its input beside it."""
    text = (
        rows
        if isinstance(rows, bytes)
        else b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    )
    (folder / "in.jsonl").write_bytes(text)
    job = {
        "model": {"path": str(model)},
        "input": {"path": "in.jsonl"},
        "output": {"path": "out.jsonl"},
        "sampling": {"max_tokens": 5, "temperature": 0},
        "resources": {"dram": "1GiB", "threads": 1},
        **sections,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def answers(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]


PROMPTS: list[object] = [{"prompt": f"The river counts {i}", "tag": i} for i in range(7)]


@pytest.fixture
def model(tiny_checkpoint: Checkpoint) -> Path:
    return tiny_checkpoint("mixtral")


def test_answers_come_in_input_order_with_the_columns_of_their_rows(
    tmp_path: Path, model: Path
) -> None:
    done = moebatch("run", write_job(tmp_path, model, PROMPTS))
    assert done.returncode == ExitCode.OK, done.stderr
    rows = answers(tmp_path)
    assert [row["tag"] for row in rows] == list(range(7))
    assert all(row["response"]["usage"]["completion_tokens"] <= 5 for row in rows)  # type: ignore[index]
    left = ["in.jsonl", "job.yaml", "out.jsonl", "out.jsonl.moebatch"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    kept = ["journal", "lock", "manifest.json", "status-1-of-1.json"]
    assert sorted(path.name for path in (tmp_path / "out.jsonl.moebatch").iterdir()) == kept


def test_the_report_has_what_was_done_and_no_control_characters(
    tmp_path: Path, model: Path
) -> None:
    done = moebatch("run", write_job(tmp_path, model, PROMPTS))
    for word in ("7 done in", "tokens/s generated", str(tmp_path / "out.jsonl"), "--details"):
        assert word in done.stderr
    assert done.stdout == ""
    assert "\x1b" not in done.stderr
    assert all(line == line.rstrip() for line in done.stderr.splitlines())
    again = moebatch("run", tmp_path / "job.yaml")
    assert "7 done before; nothing had to be computed" in again.stderr
    assert "tokens/s" not in again.stderr


def test_details_are_on_request(tmp_path: Path, model: Path) -> None:
    done = moebatch("run", write_job(tmp_path, model, PROMPTS), "--details")
    words = (
        "7 done in",
        "tok/s",
        "disk",
        "cpu",
        "peak memory",
        "of 1.00 GiB",
        "policy",
        "measured",
    )
    for word in words:
        assert word in done.stderr
    assert "--details" not in done.stderr


def test_programs_get_one_object_on_standard_output(tmp_path: Path, model: Path) -> None:
    job = write_job(tmp_path, model, PROMPTS)
    before = json.loads(moebatch("status", job, "--json").stdout)
    assert (before["rows"], before["left"], before["next"]) == (7, 7, f"moebatch run {job}")
    checked = json.loads(moebatch("check", job, "--json").stdout)
    assert (checked["exit_code"], checked["rows"], checked["faults"]) == (0, 7, [])
    done = moebatch("run", job, "--json")
    run = json.loads(done.stdout)
    assert (run["exit_code"], run["rows"], run["failed"], run["ended_now"]) == (0, 7, 0, 7)
    assert run["output"] == str(tmp_path / "out.jsonl")
    assert "policy:" in done.stderr
    after = json.loads(moebatch("status", job, "--json").stdout)
    assert (after["done"], after["next"], after["shards"][0]["state"]) == (7, None, "done")


def test_an_error_is_an_object_too_if_one_is_asked_for(tmp_path: Path, model: Path) -> None:
    done = moebatch("run", write_job(tmp_path, model, b"\n"), "--json")
    ended = json.loads(done.stdout)
    assert ended["exit_code"] == done.returncode == ExitCode.INPUT
    assert "no rows" in ended["error"] and "no rows" in done.stderr
    done = moebatch("check", write_job(tmp_path, model, b'nonsense\n{"prompt": "The"}\n'), "--json")
    found = json.loads(done.stdout)
    assert found["exit_code"] == done.returncode == ExitCode.ROWS_FAILED
    assert (found["faults"][0]["line"], found["bad_rows"]) == (1, 1)


def test_a_shard_says_who_writes_the_output(tmp_path: Path, model: Path) -> None:
    job = write_job(tmp_path, model, PROMPTS)
    done = moebatch("run", job, "--shard", "1/2")
    assert "4 of shard 1/2 done in" in done.stderr
    assert f"when all shards have ended, moebatch merge {job} writes" in done.stderr


def test_help_has_a_short_name_everywhere() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for words in ([], *([name] for name in commands)):
        done = moebatch(*words, "-h")
        assert done.returncode == 0, done.stderr
        assert "Usage:" in done.stdout


@pytest.mark.parametrize(
    ("command", "option", "name", "endings"),
    [
        ("run", "--gantt", "lanes.jpg", ".svg, .html, .png or .pdf"),
        ("run", "--trace", "trace.txt", ".json or .json.gz"),
        ("plan", "--roofline", "roof.ps", ".svg, .html, .png or .pdf"),
        ("simulate", "--gantt", "lanes", ".svg, .html, .png or .pdf"),
        ("simulate", "--trace", "trace.gz", ".json or .json.gz"),
    ],
)
def test_a_drawing_has_a_name_that_says_what_it_is(
    tmp_path: Path, command: str, option: str, name: str, endings: str
) -> None:
    done = moebatch(command, tmp_path / "no.yaml", option, tmp_path / name)
    assert done.returncode == ExitCode.CONFIG
    assert f"must end in {endings}, got " in " ".join(done.stderr.split())


@pytest.mark.exhaustive
def test_a_picture_may_be_a_page_or_an_image(tmp_path: Path) -> None:
    asked = ("--hw", "t4", "--model", "mixtral-8x7b", "--prompt-len", "77", "--gen-len", "32")
    for name, head in (("roof.HTML", b"<!doctype html>"), ("roof.png", b"\x89PNG")):
        done = moebatch("plan", *asked, "--roofline", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / name).read_bytes().startswith(head)


def test_the_list_of_commands_says_whole_sentences() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    lines = shown.partition("Commands:")[2].split("\n")
    assert len(lines) > 10
    assert not [line for line in lines if line and not re.search(r"[a-z]\.$", line)]


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["simulate", "--help"]])
def test_help_loads_nothing_that_draws(words: list[str]) -> None:
    carried_out_without("matplotlib", *words)


INTERRUPTED = """
import signal, sys
import typer.main
from moebatch.__main__ import main

# Tests that run in the background may have it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Meddler:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)

def build(*arguments, **options):
    signal.raise_signal(signal.SIGINT)

if {name!r}:
    sys.meta_path.insert(0, Meddler())
else:
    typer.main.get_command = build
sys.argv[1:] = ["run", "no.yaml"]
main()
"""


@pytest.mark.parametrize("name", ["moebatch.cli", "", "moebatch.job.options"])
def test_ctrl_c_before_a_command_has_begun_is_no_traceback(name: str) -> None:
    """While the command line is loaded, while its options are looked at, while a run is loaded."""
    code = INTERRUPTED.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.INTERRUPTED, "", "")


def test_quiet_is_silent_on_success(tmp_path: Path, model: Path) -> None:
    done = moebatch("run", write_job(tmp_path, model, PROMPTS), "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_bad_rows_do_not_harm_good_ones(tmp_path: Path, model: Path) -> None:
    good = [json.dumps(row).encode() for row in PROMPTS]
    bad = [b'{"prompt": "cut', b"\xff\xfe", b'{"prompt": "x", "tools": [1]}', b'{"nothing": 1}']
    lines = [line for pair in zip(good, [*bad, b"", b"", b""], strict=True) for line in pair]
    done = moebatch("run", write_job(tmp_path, model, b"\n".join(lines)), "--quiet")
    assert done.returncode == ExitCode.ROWS_FAILED
    assert done.stderr.startswith("4 of 11 rows failed (")
    rows = answers(tmp_path)
    assert [row["tag"] for row in rows if "tag" in row] == list(range(7))
    assert sum(row["response"]["error"] is not None for row in rows) == 4  # type: ignore[index]


def test_check_lists_every_fault_with_its_line_and_runs_nothing(
    tmp_path: Path, model: Path
) -> None:
    rows = b'{"prompt": "a"}\nnonsense\n{"prompt": "b", "tools": [1]}\n'
    done = moebatch("check", write_job(tmp_path, model, rows))
    assert done.returncode == ExitCode.ROWS_FAILED, "as a run would end"
    assert "in.jsonl:2: " in done.stdout and "invalid_json_line" in done.stdout
    assert "in.jsonl:3: " in done.stdout and "tools" in done.stdout
    assert "2 of 3 rows" in done.stdout
    assert not (tmp_path / "out.jsonl").exists()


def test_bad_rows_come_back_with_their_columns_and_names(tmp_path: Path, model: Path) -> None:
    rows: list[object] = [
        {"id": "a", "prompt": None, "topic": "é"},
        {"id": "b", "prompt": "x", "max_tokens": 10**6, "ignore_eos": True},
        {"id": "c", "question": "x", "topic": 1},
        {"id": "b", "prompt": "x", "topic": 2},
    ]
    job = write_job(tmp_path, model, rows)
    checked = moebatch("check", job)
    done = moebatch("run", job, "--quiet")
    assert checked.returncode == done.returncode == ExitCode.ROWS_FAILED
    found = answers(tmp_path)
    assert [{**row, "response": ...} for row in found] == [{**row, "response": ...} for row in rows]  # type: ignore[dict-item]
    responses: list[dict[str, object]] = [row["response"] for row in found]  # type: ignore[misc]
    assert [response["custom_id"] for response in responses] == ["a", "b", "c", "b"]
    codes = [response["error"] and response["error"]["code"] for response in responses]  # type: ignore[index]
    missing = "missing_required_parameter"
    assert codes == [missing, None, "no_prompt", "duplicate_custom_id"]
    assert responses[1]["finish_reason"] == "length"


def test_prompts_are_made_of_columns_and_asked_as_messages(tmp_path: Path, model: Path) -> None:
    rows: list[object] = [{"q": "The river", "n items": 2}, {"q": "The lamp"}]
    messages = {"messages": [{"role": "user", "content": "2: The river"}]}
    section = {"path": "in.jsonl", "prompt": "{n items}: {q}", "chat": True}
    done = moebatch("run", write_job(tmp_path, model, rows, input=section))
    assert done.returncode == ExitCode.ROWS_FAILED
    assert "note: line" not in done.stderr
    made, lacking = answers(tmp_path)
    assert made.items() >= {"q": "The river", "n items": 2}.items()
    assert lacking["response"]["error"]["code"] == "no_prompt"  # type: ignore[index]
    asked = tmp_path / "asked"
    asked.mkdir()
    assert moebatch("run", write_job(asked, model, [messages])).returncode == ExitCode.OK
    assert made["response"] == answers(asked)[0]["response"]


def test_plain_prompts_of_a_chat_model_are_told_once(tmp_path: Path, model: Path) -> None:
    job = write_job(tmp_path, model, PROMPTS)
    for command in ("check", "run"):
        done = moebatch(command, job)
        told = done.stdout + done.stderr
        assert told.count("has a plain prompt, which the model gets unchanged") == 1
    write_job(tmp_path, model, PROMPTS, input={"path": "in.jsonl", "chat": True})
    assert "gets unchanged" not in moebatch("check", job).stdout


def test_columns_that_were_surely_meant_as_parameters_are_told(tmp_path: Path, model: Path) -> None:
    rows: list[object] = [
        {"prompt": "The river", "max_token": 2, "tokens": 9, "Temperature": None, "top": 1},
        {"prompt": "Seven", "max_token": 2, "max-new-tokens": 3, "reply": 1},
    ]
    job = write_job(tmp_path, model, rows)
    for command in ("check", "run"):
        done = moebatch(command, job)
        assert done.returncode == ExitCode.OK, done.stderr
        told = done.stdout + done.stderr
        for place, name in (("line 1", "max_token"), ("line 2", "max-new-tokens")):
            note = f"{place} has a column '{name}', which is no parameter; did you mean max_tokens?"
            assert told.count(note) == 1
        assert told.count("which is no parameter") == 2
    assert answers(tmp_path)[0]["max_token"] == 2
    read = {"path": "in.jsonl", "prompt": "{prompt} {max_token}"}
    done = moebatch("check", write_job(tmp_path, model, rows[:1], input=read))
    assert "which is no parameter" not in done.stdout, "it is a part of the prompt"


@pytest.mark.parametrize("words", [("run", "../job.yaml"), ("check", "../job.yaml")])
def test_a_current_folder_that_is_gone_is_told(
    tmp_path: Path, model: Path, words: tuple[str, ...]
) -> None:
    write_job(tmp_path, model, PROMPTS)
    command = [sys.executable, "-m", "moebatch", *words]
    gone = ["sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh", *command]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.getenv("PYTHONPATH"))))
    done = subprocess.run(
        gone,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == ExitCode.STORAGE
    assert "error: the current folder is gone; change to one that is there" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_output_that_is_the_input_is_not_advised_to_be_removed(
    tmp_path: Path, model: Path
) -> None:
    job = write_job(tmp_path, model, PROMPTS, output={"path": "in.jsonl"})
    for command in ("run", "check"):
        done = moebatch(command, job)
        told = (done.stdout + done.stderr).replace("\n", " ")
        assert done.returncode == ExitCode.CONFIG
        assert "output.path: is the same as input.path; choose another" in told
        assert "remove" not in told and "move it away" not in told


def test_check_says_so_when_nothing_is_wrong(tmp_path: Path, model: Path) -> None:
    done = moebatch("check", write_job(tmp_path, model, PROMPTS))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "7 rows, no faults")


def test_a_job_file_is_read_before_the_seconds_of_imports(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom moebatch.cli import app\nfrom moebatch.errors import ConfigError\n"
        f"try:\n    app(['run', {str(tmp_path / 'no.yaml')!r}], standalone_mode=False)\n"
        "except ConfigError:\n    sys.exit('torch' in sys.modules)\n"
        "sys.exit('no fault was found')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def break_config(folder: Path) -> Path:
    copy = folder / "model"
    copy.mkdir()
    (copy / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    return copy


ENDINGS: dict[str, tuple[Callable[[Path, Path], Path], ExitCode, str]] = {
    "job file missing": (lambda tmp, model: tmp / "no.yaml", ExitCode.CONFIG, "no.yaml"),
    "unknown key": (
        lambda tmp, model: write_job(tmp, model, PROMPTS, sampling={"temprature": 1}),
        ExitCode.CONFIG,
        "temperature",
    ),
    "input missing": (
        lambda tmp, model: write_job(tmp, model, PROMPTS, input={"path": "gone.jsonl"}),
        ExitCode.INPUT,
        "gone.jsonl",
    ),
    "input empty": (
        lambda tmp, model: write_job(tmp, model, b"\n\n"),
        ExitCode.INPUT,
        "no rows",
    ),
    "no prompts": (
        lambda tmp, model: write_job(tmp, model, [{"id": i, "question": "x"} for i in range(50)]),
        ExitCode.INPUT,
        "its columns are 'id', 'question': input.prompt in the job file says which",
    ),
    "architecture unknown": (
        lambda tmp, model: write_job(tmp, break_config(tmp), PROMPTS),
        ExitCode.CHECKPOINT,
        "GPT2LMHeadModel",
    ),
    "budget too small": (
        lambda tmp, model: write_job(tmp, model, PROMPTS, resources={"dram": "100MiB"}),
        ExitCode.DOES_NOT_FIT,
        "Smallest change that fits",
    ),
    "output folder missing": (
        lambda tmp, model: write_job(tmp, model, PROMPTS, output={"path": "no/out.jsonl"}),
        ExitCode.CONFIG,
        "does not exist",
    ),
}


@pytest.mark.parametrize("make, code, message", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_mistake_is_one_message_and_its_exit_code(
    tmp_path: Path,
    model: Path,
    make: Callable[[Path, Path], Path],
    code: ExitCode,
    message: str,
) -> None:
    job = make(tmp_path, model)
    for command in ("run", "check"):
        done = moebatch(command, job)
        shown = done.stdout + done.stderr
        assert done.returncode == code, shown
        assert message in shown.replace("\n", " ")
        assert "Traceback" not in shown
    assert not list(tmp_path.glob("out.jsonl*"))


def test_the_same_job_may_run_again_and_gives_the_same_bytes(tmp_path: Path, model: Path) -> None:
    sampling = {"max_tokens": 5, "temperature": 0.8, "stop": ["a", "b"], "logit_bias": {7: 1}}
    job = write_job(tmp_path, model, PROMPTS, sampling=sampling)
    first, second = (
        (moebatch("run", job, "--quiet").returncode, (tmp_path / "out.jsonl").read_bytes())
        for _ in range(2)
    )
    assert first == second
    assert first[0] == ExitCode.OK


def test_a_path_that_may_not_be_looked_at_is_a_message() -> None:
    refused = pytest.raises(StorageError, match="job: cannot be reached: Permission denied")
    with refused, explaining_refusals():
        raise PermissionError(13, "Permission denied", "job")


def test_a_disk_that_fails_where_nobody_expects_it_is_a_message() -> None:
    refused = pytest.raises(StorageError, match="model: Input/output error")
    with refused, explaining_refusals():
        raise OSError(errno.EIO, os.strerror(errno.EIO), "model")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_log_without_room_is_a_message_whatever_bounds_it(number: int) -> None:
    refused = pytest.raises(StorageError, match="a screen or log cannot be written")
    with refused, explaining_refusals():
        raise OSError(number, os.strerror(number))


def test_temporary_files_without_room_are_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    refused = pytest.raises(StorageError, match=r"No usable temporary directory .*; make room")
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with refused, explaining_refusals():
            tempfile.gettempdir()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_thread_that_the_system_does_not_start_is_a_message() -> None:
    before = threading.stack_size(2**50)  # more than any process has room for
    refused = pytest.raises(MoebatchError, match="starts no more threads")
    try:
        with refused, explaining_refusals(), periodically(lambda: None, 1.0, thread="status"):
            pass
    finally:
        threading.stack_size(before)


def test_files_that_the_system_does_not_open_beside_others_are_a_message(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    refused = pytest.raises(MoebatchError, match=rf"{tmp_path}: cannot be opened .*ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with refused, explaining_refusals():
            list(tmp_path.iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_memory_that_the_system_refuses_is_a_message() -> None:
    with pytest.raises(OutOfMemory, match=r"refuses memory; .*ulimit -v"), explaining_refusals():
        bytearray(2**62)  # more than any process has room for


def test_a_machine_that_refuses_memory_to_measure_in_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `ulimit -v`, of which what is free says nothing."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    monkeypatch.setattr(machine, "measure_machine", refuse)
    ended = CliRunner().invoke(app, ["profile", "-o", str(tmp_path / "hardware.yaml")])
    assert isinstance(ended.exception, OutOfMemory)
    assert "refuses memory to measure in" in str(ended.exception)


def test_failed_rows_are_said_to_be_where_they_are(tmp_path: Path, model: Path) -> None:
    output = {"path": "out.jsonl", "errors": "failed.jsonl"}
    job = write_job(tmp_path, model, [*PROMPTS, {"text": "lost"}], output=output)
    for words in ("run", job), ("run", job, "--quiet"), ("merge", job, "--quiet"):
        done = moebatch(*words)
        assert done.returncode == ExitCode.ROWS_FAILED
        assert f"see {tmp_path}/failed.jsonl" in done.stderr
    assert b"lost" in (tmp_path / "failed.jsonl").read_bytes()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device without room")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_screen_without_room_ends_as_a_full_disk_does(tmp_path: Path, stream: str) -> None:
    job = write_job(tmp_path, tmp_path / "no model", PROMPTS)
    command = [sys.executable, "-m", "moebatch", "status" if stream == "stdout" else "run", job]
    with Path("/dev/full").open("w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        done = subprocess.run(command, text=True, check=False, **streams)  # type: ignore[call-overload]
    if stream == "stdout":
        assert done.returncode == ExitCode.STORAGE
        assert done.stderr == (
            "error: a screen or log cannot be written: No space left on device\n"
        )
    else:
        assert done.returncode == ExitCode.CHECKPOINT


def test_a_run_goes_on_without_standard_error(tmp_path: Path, model: Path) -> None:
    job = write_job(tmp_path, model, PROMPTS)
    code = "import os, sys; os.close(2); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", code, "-m", "moebatch", "run", str(job)]
    assert subprocess.run(command, check=False).returncode == ExitCode.OK
    assert len(answers(tmp_path)) == len(PROMPTS)


def test_a_run_without_a_terminal_of_its_own_goes_on_when_that_is_closed(
    tmp_path: Path, model: Path
) -> None:
    job = write_job(tmp_path, model, PROMPTS)
    ours, its = os.openpty()
    command = [sys.executable, "-m", "moebatch", "run", str(job)]
    with subprocess.Popen(command, stdout=its, stderr=its, start_new_session=True) as process:
        os.close(its)
        assert os.read(ours, 1)  # it has begun to say something
        os.close(ours)
    assert process.returncode == ExitCode.OK
    assert len(answers(tmp_path)) == len(PROMPTS)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_goes_on_when_nobody_reads_its_log(
    tmp_path: Path, model: Path, as_json: bool
) -> None:
    job = write_job(tmp_path, model, PROMPTS)
    command = [sys.executable, "-m", "moebatch", "run", job, *["--json"] * as_json]
    reader, log = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, check=False)
    os.close(log)
    assert done.returncode == ExitCode.OK
    assert len(answers(tmp_path)) == len(PROMPTS)
    assert not as_json or json.loads(done.stdout)["rows"] == len(PROMPTS)


@pytest.mark.parametrize("arguments", [("check", "--json"), ("pack", "--to", "int4")])
def test_a_name_longer_than_a_path_can_be_is_a_message(arguments: tuple[str, ...]) -> None:
    done = moebatch(*arguments, "a" * 300)
    assert done.returncode == ExitCode.CONFIG
    assert "longer than a path can be" in done.stderr
    assert "Traceback" not in done.stderr
    if "--json" in arguments:
        assert json.loads(done.stdout)["exit_code"] == ExitCode.CONFIG


def test_an_output_of_another_job_is_refused_and_the_difference_named(
    tmp_path: Path, model: Path
) -> None:
    assert moebatch("run", write_job(tmp_path, model, PROMPTS)).returncode == ExitCode.OK
    before = (tmp_path / "out.jsonl").read_bytes()
    job = write_job(tmp_path, model, PROMPTS, sampling={"max_tokens": 6, "temperature": 0})
    for command in ("run", "check"):
        done = moebatch(command, job)
        assert done.returncode == ExitCode.CONFIG
        text = (done.stdout + done.stderr).replace("\n", " ")
        assert "belongs to another job: sampling.max_tokens was '5', is '6'" in text
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.parametrize("command", ["run", "merge", "check"])
def test_the_root_is_no_output(command: str, tmp_path: Path, model: Path) -> None:
    done = moebatch(command, write_job(tmp_path, model, PROMPTS, output={"path": "/"}))
    assert done.returncode == ExitCode.CONFIG
    assert "output.path: is a folder; give the path of a file" in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["run", "merge", "check", "status"])
def test_a_file_in_the_place_of_the_run_folder_is_to_be_moved_away(
    command: str, tmp_path: Path, model: Path
) -> None:
    (tmp_path / "out.jsonl.moebatch").touch()
    done = moebatch(command, write_job(tmp_path, model, PROMPTS))
    assert done.returncode == ExitCode.STORAGE
    assert "out.jsonl.moebatch: is no folder" in done.stdout + done.stderr


def test_a_file_that_no_job_wrote_is_never_replaced(tmp_path: Path, model: Path) -> None:
    (tmp_path / "out.jsonl").write_text("precious")
    done = moebatch("run", write_job(tmp_path, model, PROMPTS))
    assert done.returncode == ExitCode.CONFIG
    assert "no job has written it" in done.stderr
    assert (tmp_path / "out.jsonl").read_text() == "precious"


def test_two_runs_cannot_share_an_output(tmp_path: Path, model: Path) -> None:
    from moebatch.folder.run_folder import RunFolder
    from moebatch.folder.shard import ALL

    job = write_job(tmp_path, model, PROMPTS)
    with RunFolder(tmp_path / "out.jsonl").locked(ALL):
        done = moebatch("run", job)
        skipped = moebatch("run", job, "--skip-if-locked", "--quiet")
    assert done.returncode == ExitCode.LOCK_HELD
    assert f"another run is using it (process {os.getpid()}" in done.stderr
    assert (skipped.returncode, skipped.stderr) == (ExitCode.OK, "")


LONG = {"max_tokens": 100, "temperature": 0, "ignore_eos": True}
LAMPS: list[object] = [{"prompt": f"The lamp {i}"} for i in range(3000)]
ONE_SOON: list[object] = [{"prompt": "The first lamp", "max_tokens": 2}, *LAMPS[1:500]]


def hear_ctrl_c() -> None:
    """In a new process: a shell without job control has what it starts in the background ignore
    Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def started(job: Path, *options: str) -> "subprocess.Popen[str]":
    """A run that has been planned and will take long."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moebatch", "run", str(job), *options],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("policy:"):
            break
    return process


def test_a_signal_ends_a_run_with_75_and_what_has_ended_stays(tmp_path: Path, model: Path) -> None:
    """Ctrl-C; the others are those of Slurm, see there."""
    job = write_job(tmp_path, model, ONE_SOON, sampling={**LONG, "max_tokens": 400})
    process = started(job)
    assert process.stderr is not None
    journal = tmp_path / "out.jsonl.moebatch/journal"
    until(lambda: journal.exists() and any(path.stat().st_size for path in journal.iterdir()))
    with process.stderr:
        process.send_signal(signal.SIGINT)
        message = process.stderr.read()
    assert process.wait(PATIENCE_S) == ExitCode.STOPPED
    assert "stopped early (SIGINT):" in message
    done = re.search(r"(\d+) of 500 rows are done", message)
    assert done is not None and 0 < int(done[1]) < 500
    assert "Traceback" not in message
    assert list((tmp_path / "out.jsonl.moebatch/journal").iterdir())
    assert not (tmp_path / "out.jsonl").exists()


def test_a_schedule_of_ones_own_that_never_ends_is_broken_off_and_what_has_ended_stays(
    tmp_path: Path, model: Path
) -> None:
    """Signals come to the thread that is in it; nothing else would look at them."""
    own, stuck = tmp_path / "own.py", tmp_path / "stuck"
    turns = f"""yield combine(i)
    if i > 60:
        import time
        end_s = time.monotonic() + {PATIENCE_S}
        open({str(stuck)!r}, 'w').close()
        while True: assert time.monotonic() < end_s
"""
    own.write_text(OWN.read_text().replace("yield combine(i)", turns))
    job = write_job(tmp_path, model, ONE_SOON, sampling=LONG)
    process = started(job, "--schedule", f"{own}:mine")
    assert process.stderr is not None
    until(stuck.exists)
    with process.stderr:
        process.send_signal(signal.SIGINT)
        message = process.stderr.read()
    assert process.wait(PATIENCE_S) == ExitCode.STOPPED
    assert "stopped early (SIGINT)" in message and "tokens of others; run the job again" in message
    assert "Traceback" not in message
    assert "1 of 500 rows are done" in message


STUBBORN = """
import time
from moebatch.cli.process import stopping_on_signals
from moebatch.job.stop import Stop

stop = Stop()
with stopping_on_signals(stop), stop.deferred(lambda error: None):
    print("ready", flush=True)
    while stop.reason is None:
        time.sleep(0.01)
    print(stop.reason, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_every_signal_asks_for_a_stop_and_a_second_one_ends_a_run_at_once_with_130(
    name: str,
) -> None:
    """However long it takes to stop."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    )
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline() == "ready\n"
        process.send_signal(getattr(signal, name))
        assert said.readline() == f"{name}\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == ExitCode.INTERRUPTED


LATE = """
import atexit, signal, sys
import moebatch.report.summary as summary
from moebatch.__main__ import main

def failed_rows(done):
    signal.raise_signal(signal.SIGUSR1)
    return "said"

if {where!r} == "saying":
    summary.failed_rows = failed_rows
else:
    atexit.register(signal.raise_signal, signal.SIGUSR1)
sys.argv[1:] = ["run", {job!r}, "--quiet"]
main()
"""


@pytest.mark.parametrize("where", ["saying", "unloading"])
def test_a_signal_after_the_last_row_does_not_change_how_a_run_has_ended(
    tmp_path: Path, model: Path, where: str
) -> None:
    job = write_job(tmp_path, model, [*PROMPTS[:1], {"prompt": 7}])
    code = LATE.format(where=where, job=str(job))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.ROWS_FAILED, done.stderr
    assert ("said" in done.stderr) == (where == "saying")


def test_a_full_disk_is_code_74_and_what_was_written_stays(tmp_path: Path, model: Path) -> None:
    """The system takes no more than so many bytes of each file."""
    rows: list[object] = [{"prompt": f"The lamp {i}", "note": "x" * 900} for i in range(300)]
    job = write_job(tmp_path, model, rows)
    full = subprocess.run(
        [sys.executable, "-m", "moebatch", "run", str(job), "--sync"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, 2**17)),
        env={**os.environ, "MOEBATCH_NATIVE": "0"},
    )
    assert full.returncode == ExitCode.STORAGE
    assert "no room left" in full.stderr
    assert not (tmp_path / "out.jsonl").exists()
    (journal,) = (tmp_path / "out.jsonl.moebatch/journal").iterdir()
    num_kept = journal.read_bytes().count(b'"is":"done"')
    assert num_kept > 50
    done = moebatch("run", job)
    assert done.returncode == ExitCode.OK
    assert len(answers(tmp_path)) == 300
    again = sorted((tmp_path / "out.jsonl.moebatch/journal").iterdir())[-1]
    assert again.read_bytes().count(b"\n") == 300 - num_kept


def test_a_limit_too_small_for_the_libraries_is_a_message(tmp_path: Path) -> None:
    limit = 400_000 * 1024
    refused = subprocess.run(
        [sys.executable, "-m", "moebatch", "check", str(tmp_path / "job.yaml")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert refused.returncode == ExitCode.FAILED
    assert "ulimit -v" in refused.stderr and "Traceback" not in refused.stderr


def test_merging_before_all_rows_have_ended_is_code_1(tmp_path: Path, model: Path) -> None:
    job = write_job(tmp_path, model, PROMPTS)
    assert moebatch("run", job, "--shard", "2/3", "--quiet").returncode == ExitCode.OK
    merged = moebatch("merge", job)
    assert merged.returncode == ExitCode.FAILED
    assert "5 rows have not ended yet, the first in line 1" in merged.stderr
    shown = moebatch("status", job)
    assert shown.returncode == ExitCode.OK
    assert "2 of 7 done" in shown.stdout
    assert "2/3" in shown.stdout


def test_an_input_without_rows_is_not_merged_over_the_answers(tmp_path: Path, model: Path) -> None:
    job = write_job(tmp_path, model, PROMPTS)
    assert moebatch("run", job, "--quiet").returncode == ExitCode.OK
    (tmp_path / "in.jsonl").write_bytes(b"")
    for command in "run", "merge":
        done = moebatch(command, job)
        assert done.returncode == ExitCode.INPUT
        assert "in.jsonl: holds no rows" in done.stderr
    assert len(answers(tmp_path)) == len(PROMPTS)


def test_files_cannot_command_the_terminal(tmp_path: Path, model: Path) -> None:
    rows: list[object] = [{"custom_id": "\x1b[2J", "prompt": 3}, {"\x1b]0;title\x07": 1}]
    for command in ("check", "run"):
        done = moebatch(command, write_job(tmp_path, model, rows))
        assert "\x1b" not in done.stdout + done.stderr
        assert "\x07" not in done.stdout + done.stderr


@pytest.mark.exhaustive
def test_files_have_the_rights_that_the_user_gives(tmp_path: Path, model: Path) -> None:
    job = write_job(tmp_path, model, PROMPTS[:1])
    subprocess.run(
        [sys.executable, "-m", "moebatch", "run", str(job), "--quiet"],
        preexec_fn=lambda: os.umask(0o027),
        check=True,
    )
    rights = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("out.jsonl*/**/*")}
    assert (tmp_path / "out.jsonl").stat().st_mode & 0o777 == 0o640
    assert rights <= {0o640, 0o750}


def test_a_run_stops_when_its_time_is_over(tmp_path: Path, model: Path) -> None:
    job = write_job(tmp_path, model, LAMPS, sampling=LONG)
    done = moebatch("run", job, "--max-runtime", "2s")
    assert done.returncode == ExitCode.STOPPED
    assert "the run has had its 2.0s" in done.stderr


def test_a_task_says_what_it_has_before_it_is_queued_again(tmp_path: Path, model: Path) -> None:
    """Slurm kills it at once then, and so does what stands in for `scontrol` here."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nkill -9 $PPID\n")
    scontrol.chmod(0o755)
    job = write_job(tmp_path, model, LAMPS, sampling=LONG)
    done = moebatch(
        *("run", job, "--requeue", "--max-runtime", "2s"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        SLURM_JOB_ID="7",
        SLURM_JOB_END_TIME=str(2**40),
    )
    assert done.returncode == -signal.SIGKILL
    assert "the run has had its 2.0s" in done.stderr


def test_a_usage_error_is_code_2(tmp_path: Path) -> None:
    assert moebatch("run").returncode == ExitCode.CONFIG
    assert moebatch("fly").returncode == ExitCode.CONFIG


def test_the_options_are_these_and_no_more() -> None:
    """Knobs belong to the job file; a new option needs a reason."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in commands.items()
    }
    assert found == {
        "run": [
            *("--details", "--exact", "--gantt", "--json", "--limit", "--max-runtime"),
            *("--no-share", "--policy", "--quiet", "--recalibrate", "--requeue", "--schedule"),
            *("--shard", "--skip-if-locked", "--static", "--sync", "--trace", "--trace-passes"),
            "job",
        ],
        "merge": ["--quiet", "job"],
        "status": ["--json", "job"],
        "sbatch": ["--cpus", "--option", "--output", "--shards", "--time", "-o", "job"],
        "check": ["--checksums", "--exact", "--json", "--limit", "job"],
        "plan": [
            *("--attention", "--gen-len", "--hw", "--json", "--kv-cache", "--method", "--model"),
            "--output",
            *(
                "--paper",
                "--policy",
                "--prompt-len",
                "--requests",
                "--roofline",
                "--schedule",
                "--state-cache",
                "--vendor",
            ),
            *("--weights", "--what-if", "-o", "job"),
        ],
        "simulate": [
            *("--attention", "--compare", "--durations", "--gantt", "--gen-len", "--hw", "--json"),
            "--kv-cache",
            *(
                "--method",
                "--model",
                "--num-hot",
                "--paper",
                "--passes",
                "--policy",
                "--prompt-len",
            ),
            *("--requests", "--routing", "--schedule", "--seed", "--skew", "--slots"),
            *("--state-cache", "--trace"),
            *("--vendor", "--weights", "--what-if", "--work"),
            "job",
        ],
        "profile": ["--output", "--quiet", "--read", "-o"],
        "calibrate": [
            *("--dram", "--gating", "--level", "--loss", "--output", "--path-length"),
            *("--predictor", "--pregate"),
            *("--quiet", "--text", "--tokens", "--trace", "-o", "model"),
        ],
        "pack": [
            *("--bits", "--dram", "--group", "--output", "--quiet", "--text", "--to", "--tokens"),
            *("-o", "model"),
        ],
    }
