"""Policy files: what is left open, and every sentence a file may be refused with."""

import string
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import ConfigError, Fault
from moebatch.schedule.registry import SCHEDULES, schedule_faults
from moebatch.spec.files.library import names
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.models import load_model
from moebatch.spec.policy.file import PolicyFile, load_policy
from moebatch.spec.policy.policy import STREAMING_SLOTS, OpenPolicy, Placement, Policy
from moebatch.spec.workload import Workload

FULL = """\
title: Mixtral-8x7B on a T4
source: MoE-Lightning, Table 5
note: >
  assumed
  here and there
model: mixtral-8x7b
hardware: t4
workload: {prompt_tokens: 418, new_tokens: 128, requests: 504}
policy:
  batch_size: 504
  micro_batch_size: 36
  attention_on_gpu: false
  ffn_on_gpu: true
  weights: {vram: 0.0004, dram: 0.9996}
  kv_cache: {dram: 1}
  schedule: cgopipe
  batching: mixed
  tokens_per_pass: 2048
  num_slots: 16
  num_kv_pages: 20000
published: {tokens_per_s: 30.12, wall_time_s: 2142}
prediction: {tokens_per_s: 29.7, bottleneck: staging, lanes_s: {gpu: 1.5}, job_time_s: null}
"""
SHORT = """\
policy:
  batch_size: 8
  micro_batch_size: 4
  weights: {dram: 1}
"""
JOB = Workload.uniform(prompt_tokens=418, new_tokens=128, num_sequences=1000)


def load(tmp_path: Path, text: str) -> PolicyFile:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load_policy(path, rules=schedule_faults)


def faults(tmp_path: Path, text: str) -> tuple[Fault, ...]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return caught.value.faults


def fault(tmp_path: Path, text: str) -> tuple[int | None, str | None, str]:
    (found,) = faults(tmp_path, text)
    return found.line, found.where, found.message


def changed(line: str, *, of: str = FULL) -> str:
    """A file with the line that begins with the same key replaced."""
    key = line.partition(":")[0] + ":"
    lines = [line if text.startswith(key) else text for text in of.splitlines()]
    assert line in lines
    return "\n".join(lines) + "\n"


class TestLoading:
    def test_all_that_a_file_says(self, tmp_path: Path) -> None:
        file = load(tmp_path, FULL)
        assert (file.title, file.source) == ("Mixtral-8x7B on a T4", "MoE-Lightning, Table 5")
        assert (file.note, file.model, file.hardware) == (
            "assumed here and there",
            "mixtral-8x7b",
            "t4",
        )
        assert file.path == str(tmp_path / "mine.yaml")
        assert file.workload == Workload.uniform(
            prompt_tokens=418, new_tokens=128, num_sequences=504
        )
        assert file.published["tokens_per_s"] == 30.12
        assert file.prediction == {
            "tokens_per_s": 29.7,
            "bottleneck": "staging",
            "lanes_s": {"gpu": 1.5},
            "job_time_s": None,
        }
        assert file.policy.resolve(JOB, num_experts=256) == Policy(
            batch_size=504,
            micro_batch_size=36,
            tokens_per_pass=2048,
            num_slots=16,
            num_kv_pages=20000,
            weights=Placement(vram=0.0004, dram=0.9996),
            kv_cache=Placement(dram=1),
            attention_on_gpu=False,
            ffn_on_gpu=True,
            schedule="cgopipe",
            batching="mixed",
        )

    def test_a_short_file_has_the_defaults_of_a_policy(self, tmp_path: Path) -> None:
        file = load(tmp_path, SHORT)
        assert (file.title, file.source, file.workload) == ("mine", "", None)
        assert (file.published, file.prediction) == ({}, {})
        assert file.policy == OpenPolicy(
            batch_size=8, micro_batch_size=4, weights=Placement(dram=1)
        )

    def test_a_workload_without_requests_has_no_end(self, tmp_path: Path) -> None:
        text = changed("workload: {prompt_tokens: 76.5, new_tokens: 32}")
        workload = load(tmp_path, text).workload
        assert workload is not None
        assert (workload.num_sequences, workload.max_total_tokens) == (None, 109)

    @pytest.mark.parametrize("shares", ["vram: 0.33333, dram: 0.66666", "vram: 0.5, dram: 0.50005"])
    def test_rounded_shares_are_made_to_sum_to_one(self, shares: str, tmp_path: Path) -> None:
        weights = load(tmp_path, changed(f"  weights: {{{shares}}}")).policy.weights
        assert weights.vram + weights.dram == pytest.approx(1, abs=1e-12)

    def test_policies_come_by_name(self) -> None:
        file = load_policy("MoE-Lightning T4 MTBench 128")
        assert file.policy.batch_size == 504
        with pytest.raises(ConfigError, match="no policy of that name; did you mean flexgen"):
            load_policy("flexgen-t4-mtbench-127")


class TestOpenDetails:
    def resolved(self, job: Workload = JOB, **fields: object) -> Policy:
        policy = OpenPolicy(
            **{
                "batch_size": 100,
                "micro_batch_size": 20,
                "weights": Placement(dram=0.25, disk=0.75),
                **fields,
            }
        )
        return policy.resolve(job, num_experts=256)

    def test_pages_are_for_a_batch_of_the_longest_sequences(self) -> None:
        assert self.resolved().num_kv_pages == 100 * 35  # 546 tokens in pages of 16
        assert self.resolved(num_kv_pages=7).num_kv_pages == 7

    def test_a_mixed_pass_takes_in_prompts_as_fast_as_answers_end(self) -> None:
        assert self.resolved().tokens_per_pass == 427  # 100 (1 + 418 / 128), rounded up
        assert self.resolved(tokens_per_pass=200).tokens_per_pass == 200

    def test_a_static_pass_is_the_batch(self) -> None:
        assert self.resolved(batching="static").tokens_per_pass == 100

    def test_experts_stream_through_slots(self) -> None:
        assert self.resolved().num_slots == STREAMING_SLOTS
        assert self.resolved(num_slots=3).num_slots == 3
        few = OpenPolicy(batch_size=1, micro_batch_size=1, weights=Placement(disk=1))
        assert few.resolve(JOB, num_experts=4).num_slots == 4

    def test_experts_that_are_where_they_are_computed_need_none(self) -> None:
        assert self.resolved(weights=Placement(dram=1)).num_slots == 0
        assert self.resolved(weights=Placement(vram=1), ffn_on_gpu=True).num_slots == 0
        streamed = self.resolved(weights=Placement(dram=1), ffn_on_gpu=True)
        assert streamed.num_slots == STREAMING_SLOTS


def test_a_policy_counts_one_and_several() -> None:
    one = Policy(
        batch_size=1,
        micro_batch_size=1,
        tokens_per_pass=9,
        weights=Placement(dram=1),
        kv_cache=Placement(dram=1),
        num_slots=1,
        num_kv_pages=1,
    )
    assert str(one).startswith("up to 1 sequence, micro-batches of 1, 9 tokens a pass, ")
    assert ", 1 slot, 1 KV page 100 % dram, " in str(one)
    assert "up to 2 sequences" in str(replace(one, batch_size=2))


POLICIES = st.builds(
    lambda batch, micro, more, **rest: Policy(
        batch_size=batch, micro_batch_size=micro, tokens_per_pass=batch + more, **rest
    ),
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.integers(0, 4096),
    num_slots=st.integers(1, 64),
    num_kv_pages=st.integers(1, 10**7),
    weights=st.floats(0, 1).map(lambda share: Placement(dram=share, disk=1 - share)),
    kv_cache=st.floats(0, 1).map(lambda share: Placement(dram=share, disk=1 - share)),
    attention_on_gpu=st.just(False),
    ffn_on_gpu=st.booleans(),
    schedule=st.sampled_from([name for name in SCHEDULES if name != "flexgen"]),
    num_hot=st.none() | st.integers(0, 64),
)
WORDS = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=20)


class TestWriting:
    def test_what_is_written_reads_as_the_same(self, tmp_path: Path) -> None:
        file = load(tmp_path, FULL)
        assert load(tmp_path, file.to_yaml()) == file
        short = load(tmp_path, SHORT)
        assert load(tmp_path, short.to_yaml()) == short

    def test_the_parts_stand_in_the_order_in_which_they_are_explained(self, tmp_path: Path) -> None:
        written = load(tmp_path, FULL).to_yaml()
        keys = [line.partition(":")[0] for line in written.splitlines() if line[0] != " "]
        assert keys == [
            *("title", "source", "note", "model", "hardware", "workload"),
            *("policy", "published", "prediction"),
        ]
        assert "  weights: {vram: 0.0004, dram: 0.9996}\n" in written

    @given(policy=POLICIES, title=WORDS, source=WORDS, speed=st.floats(1e-3, 1e6))
    def test_any_policy_comes_back(
        self, tmp_path_factory: pytest.TempPathFactory, policy: Policy, title: str, source: str,
        speed: float,
    ) -> None:  # fmt: skip
        path = tmp_path_factory.mktemp("policy") / "mine.yaml"
        file = PolicyFile(
            title=title,
            source=source,
            policy=OpenPolicy.of(policy),
            prediction={"tokens_per_s": speed},
            path=str(path),
        )
        path.write_text(file.to_yaml())
        read = load_policy(path)
        assert (read.title, read.source, read.prediction) == (title, source, file.prediction)
        again = read.policy.resolve(JOB, num_experts=256)
        assert again.weights.dram == pytest.approx(policy.weights.dram, abs=1e-12)
        assert again.micro_batch_size == min(policy.micro_batch_size, policy.batch_size)
        names = ("batch_size", "tokens_per_pass", "num_slots", "num_kv_pages", "schedule")
        for name in (*names, "num_hot"):
            assert getattr(again, name) == getattr(policy, name)

    def test_a_static_policy_leaves_out_what_means_nothing(self) -> None:
        policy = load_policy("flexgen-t4-mtbench-32").policy.resolve(JOB, num_experts=256)
        assert policy.tokens_per_pass == policy.batch_size == 1280
        written = PolicyFile(title="x", policy=OpenPolicy.of(policy)).to_yaml()
        assert "tokens_per_pass" not in written
        assert "num_kv_pages: 44800\n" in written


class TestRefusals:
    @pytest.mark.parametrize(
        ("line", "where", "message"),
        [
            (
                "  batch_size: 0",
                "policy.batch_size",
                "must be a whole number from 1 to 1048576, got 0",
            ),
            (
                "  batch_size: -4",
                "policy.batch_size",
                "must be a whole number from 1 to 1048576, got -4",
            ),
            (
                "  batch_size: 1e30",
                "policy.batch_size",
                "must be a whole number from 1 to 1048576, got 1e+30",
            ),
            (
                "  batch_size: 504.0",
                "policy.batch_size",
                "must be a whole number from 1 to 1048576, got 504.0",
            ),
            (
                "  micro_batch_size: .nan",
                "policy.micro_batch_size",
                "must be a whole number from 1 to 1048576, got nan",
            ),
            (
                "  micro_batch_size: true",
                "policy.micro_batch_size",
                "must be a whole number from 1 to 1048576, got true",
            ),
            (
                "  micro_batch_size: 505",
                "policy.micro_batch_size",
                "is 505, more than batch_size, which is 504",
            ),
            (
                "  attention_on_gpu: 1",
                "policy.attention_on_gpu",
                "must be true or false, got 1",
            ),
            ("  ffn_on_gpu: 'yes'", "policy.ffn_on_gpu", "must be true or false, got 'yes'"),
            (
                "  weights: {vram: 0.1, dram: 0.8}",
                "policy.weights",
                "shares must sum to 1, they sum to 0.9",
            ),
            (
                "  weights: {vram: 0.5, dram: 0.5002}",
                "policy.weights",
                "shares must sum to 1, they sum to 1.0002",
            ),
            ("  weights: {}", "policy.weights", "shares must sum to 1, they sum to 0"),
            (
                "  weights: {dram: .nan}",
                "policy.weights.dram",
                "must be a number from 0 to 1, got nan",
            ),
            (
                "  weights: {dram: 1.2}",
                "policy.weights.dram",
                "must be a number from 0 to 1, got 1.2",
            ),
            (
                "  weights: {dram: 1, disk: -0.2}",
                "policy.weights.disk",
                "must be a number from 0 to 1, got -0.2",
            ),
            (
                "  weights: 0.3",
                "policy.weights",
                "must be a mapping with keys of its own (vram, dram, disk), got 0.3",
            ),
            (
                "  weights: {ram: 1, dram: 1}",
                "policy.weights.ram",
                "unknown key; did you mean policy.weights.vram or policy.weights.dram?",
            ),
            (
                "  kv_cache: {vram: 0.5, dram: 0.5}",
                "policy.kv_cache",
                "vram must be 0 where attention_on_gpu is false: a CPU reads from dram",
            ),
            (
                "  ffn_on_gpu: false",
                "policy.weights",
                "vram must be 0 where ffn_on_gpu is false: a CPU reads from dram",
            ),
            (
                "  schedule: cgopipes",
                "policy.schedule",
                "no schedule is named 'cgopipes'; did you mean cgopipe? 'list' in its place shows "
                f"all {len(SCHEDULES)}; or give your own as file.py:name",
            ),
            (
                "  schedule: [cgopipe]",
                "policy.schedule",
                "must be a text, got ['cgopipe']",
            ),
            (
                "  schedule: flexgen",
                "policy.schedule",
                "flexgen needs attention_on_gpu: true; on the CPU it is flexgen_c",
            ),
            ("  batching: both", "policy.batching", "must be one of mixed, static, got 'both'"),
            (
                "  batching: static",
                "policy.tokens_per_pass",
                "means nothing with batching: static, where all prompts of a batch are one pass; "
                "leave it out",
            ),
            (
                "  tokens_per_pass: 503",
                "policy.tokens_per_pass",
                "is 503, too few for one token of each of the 504 sequences of batch_size; raise "
                "it or lower that",
            ),
            (
                "  tokens_per_pass: null",
                "policy.tokens_per_pass",
                "must be a whole number from 1 to 16777216, got null",
            ),
            (
                "  num_slots: 0",
                "policy.num_slots",
                "is 0, but some experts do not live where they are computed; leave it out, or put "
                "all of weights on vram",
            ),
            (
                "  num_kv_pages: 0",
                "policy.num_kv_pages",
                "must be a whole number from 1 to 1099511627776, got 0",
            ),
            ("title: 7", "title", "must be a text, got 7"),
            ('source: "a\\e[2Jb"', "source", "must be a text, got 'a\\x1b[2Jb'"),
            (
                "workload: {prompt_tokens: 418}",
                "workload.new_tokens",
                "is missing and has no default",
            ),
            (
                "workload: mtbench",
                "workload",
                "must be a mapping with keys of its own (prompt_tokens, new_tokens, requests), got "
                "'mtbench'",
            ),
            (
                "workload: {prompt_tokens: 0, new_tokens: 128}",
                "workload.prompt_tokens",
                "must be a number from 1 to 2.14748e+09, got 0",
            ),
            (
                "workload: {prompt_tokens: 4, new_tokens: 128, requests: 0.5}",
                "workload.requests",
                "must be a whole number from 1 to 1000000000000, got 0.5",
            ),
            ("published: 30.12", "published", "must be a mapping of names to figures, got 30.12"),
            (
                "published: {tokens_per_s: -1}",
                "published.tokens_per_s",
                "must be a number from 0 to 1e+12, got -1",
            ),
            (
                "published: {tokens_per_s: 0}",
                "published.tokens_per_s",
                "must be above 0, got 0",
            ),
            (
                "published: {tokens_per_s: fast}",
                "published.tokens_per_s",
                "must be a number from 0 to 1e+12, got 'fast'",
            ),
            (
                "prediction: {lanes_s: {gpu: [1, .inf]}}",
                "prediction.lanes_s.gpu[1]",
                "must be a figure or a text, got inf",
            ),
        ],
    )
    def test_values(self, line: str, where: str, message: str, tmp_path: Path) -> None:
        text = changed(line)
        number, found, said = fault(tmp_path, text)
        assert (found, said) == (where, message)
        key = where.partition(".")[2].partition(".")[0] if where.startswith("policy") else where
        lines = text.splitlines()
        assert number is not None and key.partition(".")[0] in lines[number - 1]

    def test_flexgen_with_its_attention_on_the_cpu_has_a_name_of_its_own(
        self, tmp_path: Path
    ) -> None:
        text = changed("  attention_on_gpu: true", of=changed("  schedule: flexgen_c"))
        assert fault(tmp_path, text)[2] == (
            "flexgen_c needs attention_on_gpu: false; on the GPU it is flexgen"
        )

    def test_without_a_gpu_flexgen_attends_on_the_cpu_by_either_name(self, tmp_path: Path) -> None:
        for name in ("flexgen", "flexgen_c"):
            assert load(tmp_path, f"{SHORT}  schedule: {name}\n").policy.schedule == name

    def test_unknown_keys(self, tmp_path: Path) -> None:
        assert fault(tmp_path, SHORT + "batch_size: 8\n") == (
            5,
            "batch_size",
            "unknown key; did you mean policy.batch_size?",
        )
        assert fault(tmp_path, SHORT + "  schedul: klotski\n")[1:] == (
            "policy.schedul",
            "unknown key; did you mean policy.schedule?",
        )
        assert fault(tmp_path, SHORT + "colour: red\n")[2].startswith(
            "unknown key; allowed are title, source, note, model"
        )

    def test_a_file_without_a_policy(self, tmp_path: Path) -> None:
        assert fault(tmp_path, "title: x\n") == (
            None,
            "policy",
            "is missing; add it with batch_size, micro_batch_size, weights",
        )
        assert fault(tmp_path, "policy: 3\n")[2].startswith("must be a mapping with keys of its")
        assert [str(each).partition(":")[2] for each in faults(tmp_path, "policy: {}\n")] == [
            "1: policy.batch_size: is missing and has no default",
            "1: policy.micro_batch_size: is missing and has no default",
            "1: policy.weights: is missing; add it with vram, dram, disk",
        ]

    def test_all_faults_at_once(self, tmp_path: Path) -> None:
        text = SHORT.replace("8", "0").replace("4", ".inf") + "  num_slots: -1\nsauce: ''\n"
        assert [(each.line, each.where) for each in faults(tmp_path, text)] == [
            (2, "policy.batch_size"),
            (3, "policy.micro_batch_size"),
            (5, "policy.num_slots"),
            (6, "sauce"),
        ]

    @given(
        text=st.text(string.printable + "é\u2028\x85", max_size=40)
        | st.sampled_from(
            ["{}", "[]", "null", "1" + "0" * 400, "1e400", ".nan", "-0.0", "{a: {}}"]
        ),
        line=st.integers(0, len(FULL.splitlines()) - 1),
    )
    def test_any_damage_is_a_fault_or_a_policy(
        self, tmp_path_factory: pytest.TempPathFactory, text: str, line: int
    ) -> None:
        lines = FULL.splitlines()
        lines[line] = lines[line].partition(":")[0] + ": " + text
        path = tmp_path_factory.getbasetemp() / "damaged-policy.yaml"
        path.write_text("\n".join(lines), encoding="utf-8")
        try:
            file = load_policy(path)
        except ConfigError as error:
            assert error.faults
        else:
            assert file.policy.resolve(JOB, num_experts=256).batch_size >= 1

    def test_what_does_not_go_together_is_said_at_once_for_policy_and_schedule(
        self, tmp_path: Path
    ) -> None:
        text = SHORT.replace("micro_batch_size: 4", "micro_batch_size: 9")
        text += "  ffn_on_gpu: true\n  schedule: flexgen\n"
        assert [each.where for each in faults(tmp_path, text)] == [
            "policy.micro_batch_size",
            "policy.schedule",
        ]

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no such file; give the path of a policy file"):
            load_policy(tmp_path / "missing.yaml")


@pytest.mark.parametrize("name", names("saved"))
def test_files_that_come_with_moebatch_say_where_they_come_from(name: str) -> None:
    file = load_policy(name)
    assert file.title and file.source
    assert file.workload is not None
    assert load_profile(file.hardware).levels.keys() >= {"vram", "dram"}
    num_experts = load_model(file.model).shape.num_experts
    assert file.policy.resolve(file.workload, num_experts=num_experts).batching == "static"
