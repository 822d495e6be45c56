"""Keys and values in 8 bits, as a job asks for them: opt-in, part of its identity, refused where
answers have to be exact, and more sequences in the same memory."""

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
from moebatch.layout.load import PassLoad
from moebatch.plan.options import PlanOptions
from moebatch.plan.question import stated_question
from moebatch.plan.search.planner import best_policy
from moebatch.spec.job import load_job
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.cache_layout import KvCache
from moebatch.spec.workload import Workload
from tests.job.test_gating import as_openai, texts_and_fingerprint
from tests.job.test_run import EMULATED, on_gpu, policy, run, texts, write
from tests.plan.problems import SMALL, cpu_machine, problem
from tests.tiny import write_checkpoint

Checkpoint = Callable[..., Path]


def test_it_is_said_and_part_of_what_answers_belong_to(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    model = tiny_checkpoint("mixtral")
    path = as_openai(write(tmp_path, model))
    run(path, policy=policy())
    _, exact = texts_and_fingerprint(path)
    _, told = run(as_openai(write(tmp_path, model, kv_cache="int8")), policy=policy())
    assert any("keys and values are cached in int8: answers are not exactly" in t for t in told)
    _, name = texts_and_fingerprint(path)
    assert name.startswith(f"{exact}-kv-int8-")
    as_openai(write(tmp_path, model, kv_cache="fp8"))
    with pytest.raises(ConfigError, match=r"resources.kv_cache was 'int8', is 'fp8'"):
        JobRun(load_job(path), lambda line: None).execute()


def test_answers_are_the_same_on_every_device(tmp_path: Path, tiny_checkpoint: Checkpoint) -> None:
    model = tiny_checkpoint("mixtral")
    path = write(tmp_path, model, kv_cache="fp8")
    run(path, policy=policy(), is_plain=True)
    answers = texts(path)
    for resources, asked in (({}, policy()), (EMULATED, on_gpu())):
        write(tmp_path, model, kv_cache="fp8", **resources)
        run(path, policy=asked)
        assert texts(path) == answers


def test_exact_answers_forbid_it_together_with_all_else(
    tmp_path: Path, tiny_checkpoint: Checkpoint
) -> None:
    path = write(tmp_path, tiny_checkpoint("mixtral"), kv_cache="int8")
    with pytest.raises(ConfigError, match=r"--exact: forbids resources.kv_cache: int8.*to full"):
        run(path, is_exact=True)
    job = json.loads(path.read_text())
    path.write_text(json.dumps({**job, "experts": {"gating": "adaptive"}}))
    faults = check_job(path, CheckOptions(is_exact=True)).faults
    assert sum("forbids" in fault.message for fault in faults) == 2


def test_a_wrong_name_is_refused_with_what_there_is(tmp_path: Path) -> None:
    path = write(tmp_path, write_checkpoint(tmp_path / "model", "mixtral"), kv_cache="int4")
    with pytest.raises(ConfigError, match="must be one of full, int8, fp8, got 'int4'"):
        load_job(path)
    path = write(tmp_path, tmp_path / "model", kv_cach="int8")
    with pytest.raises(ConfigError, match=r"did you mean resources\.kv_cache"):
        load_job(path)


@pytest.mark.exhaustive
def test_where_the_cache_limits_the_batch_about_twice_the_sequences_fit() -> None:
    asked = problem(
        cpu_machine(2, flops=5e12),
        shape=SMALL,
        workload=Workload.uniform(prompt_tokens=3000, new_tokens=100, num_sequences=200),
        kv_on_disk=False,
    )
    full = best_policy(asked).policy
    coded = best_policy(replace(asked, shape=SMALL.cached_in("int8"))).policy
    assert coded.batch_size >= 1.5 * full.batch_size, "the planner has other uses of memory, too"
    twice = replace(full, num_kv_pages=round(1.9 * full.num_kv_pages))
    in_full, in_8_bits = (
        asked.memory.footprints(chosen)["dram"].terms[KV_TERM]
        for asked, chosen in (
            (asked, full),
            (replace(asked, shape=SMALL.cached_in("int8")), twice),
        )
    )
    assert in_8_bits < in_full


def test_attention_is_priced_by_the_rate_that_is_measured_for_it() -> None:
    asked = problem(cpu_machine(2, flops=5e12), shape=SMALL)
    dram = asked.hardware.dram
    assert dram.processor is not None
    usual, load = dram.processor.attention_bandwidth, PassLoad(9, 9000)
    slow = replace(dram.processor, sequence_s=0.0, coded_attention={"int8": usual / 5})
    priced = replace(asked, hardware=asked.with_level(replace(dram, processor=slow)).hardware)

    def seconds(how: KvCache) -> float:
        of = replace(priced, shape=SMALL.cached_in(how))
        return of.prices.decode_attention_s(load, slow)

    coded_bytes, full_bytes = (
        SMALL.cached_in(how).kv_bytes_per_token(2) for how in ("int8", "full")
    )
    assert seconds("int8") == pytest.approx(5 * coded_bytes / full_bytes * seconds("full"))
    assert seconds("fp8") == pytest.approx(coded_bytes / full_bytes * seconds("full"))


def test_plan_takes_it_as_an_option(tmp_path: Path, tiny_checkpoint: Checkpoint) -> None:
    lengths = {"has_job": False, "model": "mixtral-8x7b", "prompt_len": 9, "gen_len": 9}
    profile = load_profile("t4")
    for how in (None, "full", "fp8"):
        shape = stated_question(profile, PlanOptions(kv_cache=how, **lengths)).problem.shape
        assert shape.attention.cache_dtype == (how if how == "fp8" else None)
    job = load_job(write(tmp_path, tiny_checkpoint("mixtral"), kv_cache="fp8"))
    for how, found in ((None, "fp8"), ("full", None), ("int8", "int8")):
        asked = job_question(job, PlanOptions(has_job=True, hw="t4", kv_cache=how))
        assert asked.problem.shape.attention.cache_dtype == found
