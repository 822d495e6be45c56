"""States of recurrent layers in float16, as a job asks for them: opt-in, part of its identity,
refused where answers have to be exact or there are none, and half of the room."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moebatch.errors import ConfigError
from moebatch.job.question import job_question
from moebatch.job.run import JobRun
from moebatch.plan.as_json import answer_json
from moebatch.plan.methods import answer_question
from moebatch.plan.options import PlanOptions
from moebatch.plan.question import stated_question
from moebatch.spec.job import load_job
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.models import load_model
from moebatch.spec.policy.policy import Placement
from tests.job.test_gating import as_openai, texts_and_fingerprint
from tests.job.test_run import EMULATED, on_gpu, policy, run, texts, write
from tests.native import kernels

Checkpoint = Callable[..., Path]
RECURRENT = pytest.mark.parametrize(
    "family",
    [
        *("qwen3_next", "qwen3_5_moe", "kimi_linear", "bailing_hybrid", "granitemoehybrid"),
        *("minimax", "lara_mini", "jamba"),
    ],
)


def test_it_is_said_and_part_of_what_answers_belong_to(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    model = tiny_checkpoint("qwen3_next")
    path = as_openai(write(tmp_path, model))
    run(path, policy=policy())
    _, exact = texts_and_fingerprint(path)
    _, told = run(as_openai(write(tmp_path, model, state_cache="float16")), policy=policy())
    assert any("states are kept in float16: answers are not exactly" in t for t in told)
    _, name = texts_and_fingerprint(path)
    assert name.startswith(f"{exact}-half-states-")
    as_openai(write(tmp_path, model))
    with pytest.raises(ConfigError, match=r"resources.state_cache was 'float16', is null"):
        JobRun(load_job(path), lambda line: None).execute()


@RECURRENT
@pytest.mark.skipif(not kernels(), reason="torch rounds where prompts are cut")
def test_answers_are_the_same_wherever_states_are_and_however_prompts_are_cut(
    tmp_path: Path, tiny_checkpoint: Checkpoint, family: str
) -> None:
    model = tiny_checkpoint(family)
    path = write(tmp_path, model, state_cache="float16")
    run(path, policy=policy(), is_plain=True)
    answers = texts(path)
    on_disk = policy(kv_cache=Placement(disk=1.0))
    cut = policy(tokens_per_pass=3, batch_size=2, micro_batch_size=1)
    for resources, asked in (({}, policy()), ({}, on_disk), ({}, cut), (EMULATED, on_gpu())):
        write(tmp_path, model, state_cache="float16", **resources)
        run(path, policy=asked)
        assert texts(path) == answers


def test_exact_answers_and_models_without_states_forbid_it(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    path = write(tmp_path, tiny_checkpoint("qwen3_next"), state_cache="float16")
    with pytest.raises(ConfigError, match=r"forbids resources.state_cache: float16.*to full"):
        run(path, is_exact=True)
    for family in ("mixtral", "lfm2_moe"):
        path = write(tmp_path, tiny_checkpoint(family), state_cache="float16")
        with pytest.raises(ConfigError, match=r"state_cache: .* keeps no states in float32; leave"):
            run(path, policy=policy())
    path.write_text(path.read_text().replace('"float16"', '"bfloat16"'))
    with pytest.raises(ConfigError, match="must be one of full, float16, got 'bfloat16'"):
        load_job(path)


def test_matrices_take_half_of_the_room() -> None:
    shape = load_model("qwen3-next-80b-a3b").shape
    delta, halves = shape.recurrence, shape.cached_in(states="float16").recurrence
    assert delta is not None and halves is not None
    matrices = 32 * 128 * 128
    inputs = delta.state.token_bytes(2) - 4 * matrices
    assert halves.state.token_bytes(2) == 2 * matrices + inputs


def test_plan_takes_it_as_an_option(tmp_path: Path, tiny_checkpoint: Checkpoint) -> None:
    lengths = {"has_job": False, "model": "qwen3-next-80b-a3b", "prompt_len": 9, "gen_len": 9}
    asked = PlanOptions(state_cache="float16", **lengths)
    question = stated_question(load_profile("h100"), asked)
    assert answer_json(answer_question(question, asked))["state_cache"] == "float16"
    job = load_job(write(tmp_path, tiny_checkpoint("qwen3_next"), state_cache="float16"))
    for how, found in ((None, "float16"), ("full", "float32")):
        options = PlanOptions(has_job=True, hw="t4", state_cache=how)
        delta = job_question(job, options).problem.shape.recurrence
        assert delta is not None and delta.state_dtype == found
