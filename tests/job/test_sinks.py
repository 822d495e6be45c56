"""Sinks and a window, as a job asks for them: opt-in, part of its identity, refused where answers
have to be exact, and more sequences in the same memory."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moebatch.errors import ConfigError
from moebatch.job.check import check_job
from moebatch.job.options import CheckOptions
from moebatch.job.question import job_question
from moebatch.job.run import JobRun
from moebatch.layout.buffers import KV_TERM
from moebatch.plan.options import PlanOptions
from moebatch.plan.question import stated_question
from moebatch.plan.search.planner import best_policy
from moebatch.spec.job import load_job
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.cache_layout import SinkWindow
from moebatch.spec.policy.policy import pages_of
from moebatch.spec.workload import Length, Workload
from tests.job.test_gating import as_openai, texts_and_fingerprint
from tests.job.test_run import EMULATED, on_gpu, policy, run, texts, write
from tests.plan.problems import SMALL, cpu_machine, problem

Checkpoint = Callable[..., Path]
FEW = {"sinks": 2, "window": 3}


def write_with(folder: Path, model: Path, attention: object, **resources: object) -> Path:
    path = write(folder, model, **resources)
    job = json.loads(path.read_text())
    job["model"]["attention"] = attention
    path.write_text(json.dumps(job))
    return path


def test_it_is_said_and_part_of_what_answers_belong_to(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    model = tiny_checkpoint("mixtral")
    path = as_openai(write(tmp_path, model))
    run(path, policy=policy())
    exact_texts, exact = texts_and_fingerprint(path)
    _, told = run(as_openai(write_with(tmp_path, model, FEW)), policy=policy())
    said = "tokens see 2 sinks and a window of 3 tokens: answers are not exactly"
    assert any(said in line for line in told)
    found, name = texts_and_fingerprint(path)
    assert name.startswith(f"{exact}-sinks-") and found != exact_texts
    as_openai(write_with(tmp_path, model, {**FEW, "window": 4}))
    with pytest.raises(ConfigError, match=r"model\.attention was '2 sinks and a window of 3"):
        JobRun(load_job(path), lambda line: None).execute()


def test_answers_are_the_same_on_every_device(tmp_path: Path, tiny_checkpoint: Checkpoint) -> None:
    model = tiny_checkpoint("mixtral")
    path = write_with(tmp_path, model, FEW, kv_cache="int8")
    run(path, policy=policy(), is_plain=True)
    answers = texts(path)
    for resources, asked in (({}, policy()), (EMULATED, on_gpu())):
        write_with(tmp_path, model, FEW, kv_cache="int8", **resources)
        run(path, policy=asked)
        assert texts(path) == answers


def test_exact_answers_forbid_it(tmp_path: Path, tiny_checkpoint: Checkpoint) -> None:
    path = write_with(tmp_path, tiny_checkpoint("mixtral"), FEW)
    match = r"--exact: forbids model\.attention: 2 sinks and a window of 3 tokens.*leave it out"
    with pytest.raises(ConfigError, match=match):
        run(path, is_exact=True)
    (fault,) = check_job(path, CheckOptions(is_exact=True)).faults
    assert "forbids model.attention" in fault.message
    assert not check_job(path, CheckOptions()).faults


def test_layers_without_rotary_positions_forbid_it(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    path = write_with(tmp_path, tiny_checkpoint("kimi_linear"), FEW)
    with pytest.raises(ConfigError, match=r"model\.attention: .* has no rotary positions, so"):
        run(path, policy=policy())


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"sinks": 4}, r"attention\.window"),
        ({"window": 0}, r"attention\.window: must be a whole number from 1"),
        ({"sinks": -1, "window": 9}, r"attention\.sinks: must be a whole number from 0"),
        ({"windows": 9}, r"did you mean model\.attention\.window"),
        ("full", r"attention: must be a mapping such as {sinks: 4, window: 1024}"),
    ],
)
def test_what_it_cannot_be_is_refused_by_name(
    tmp_path: Path, attention: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_job(write_with(tmp_path, tmp_path / "model", attention))


def test_it_is_off_by_default_and_has_four_sinks(tmp_path: Path) -> None:
    assert load_job(write(tmp_path, tmp_path / "model")).model.sink_window is None
    for attention, found in ((None, None), ({"window": 9}, SinkWindow(4, 9))):
        job = load_job(write_with(tmp_path, tmp_path / "model", attention))
        assert job.model.sink_window == found


SINKS = SinkWindow(4, 1024)
LONG = Workload.uniform(prompt_tokens=6000, new_tokens=100, num_sequences=200)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["uniform", "ragged"])
def test_more_long_sequences_fit(kind: str) -> None:
    lengths = tuple(Length(2000 + 80 * n, 100) for n in range(100)) if kind == "ragged" else ()
    asked = problem(
        cpu_machine(2, flops=5e12),
        shape=SMALL,
        workload=replace(LONG, lengths=lengths, max_total_tokens=10_020 if lengths else 6100),
        kv_on_disk=False,
    )
    shape = SMALL.seen_through(SINKS)
    less = replace(asked, shape=shape, workload=shape.cached(asked.workload))
    full, few = best_policy(asked).policy, best_policy(less).policy
    assert few.batch_size >= 1.5 * full.batch_size
    assert few.num_kv_pages <= few.batch_size * pages_of(4 + 1024 + 511)
    of_cache = [p.memory.footprints(few)["dram"].terms[KV_TERM] for p in (asked, less)]
    assert of_cache[0] == of_cache[1], "a page is a page"


def test_plan_takes_it_as_an_option(tmp_path: Path, tiny_checkpoint: Checkpoint) -> None:
    lengths = {"has_job": False, "model": "mixtral-8x7b", "prompt_len": 9, "gen_len": 9}
    profile = load_profile("t4")
    for text, found in ((None, None), ("4+1024", SINKS), ("0+ 7", SinkWindow(0, 7))):
        asked = stated_question(profile, PlanOptions(attention=text, **lengths)).problem
        assert asked.shape.attention.sink_window == found
    for wrong in ("", "4", "4+0", "+9", "4+-1", "four+9"):
        ((option, message),) = PlanOptions(attention=wrong, **lengths).contradictions()
        assert option == "--attention" and "such as 4+1024" in message
    job = load_job(write_with(tmp_path, tiny_checkpoint("mixtral"), FEW))
    for text, found in ((None, SinkWindow(2, 3)), ("4+1024", SINKS)):
        asked = job_question(job, PlanOptions(has_job=True, hw="t4", attention=text)).problem
        assert asked.shape.attention.sink_window == found
