"""Questions about machines and models that need not be here."""

from dataclasses import replace
from pathlib import Path

import pytest

from moebatch.errors import ConfigError
from moebatch.formats.plain import BFLOAT16, FLOAT16
from moebatch.plan.options import PlanOptions
from moebatch.plan.question import stated_question
from moebatch.spec.machine.profile import load_profile

ASKED = PlanOptions(model="mixtral-8x7b", prompt_len=77, gen_len=128)
NARROW = """\
config:
  architectures: [MixtralForCausalLM]
  hidden_size: 64
  intermediate_size: 80
"""


@pytest.mark.parametrize(("hardware", "is_emulated"), [("t4", True), ("l4", False)])
def test_a_gpu_without_bfloat16_is_planned_in_float16_and_the_plan_says_why(
    hardware: str, is_emulated: bool
) -> None:
    question = stated_question(load_profile(hardware), ASKED)
    assert question.problem.dtypes.stored == (FLOAT16 if is_emulated else BFLOAT16)
    assert not question.problem.dtypes.converts
    told = [note for note in question.notes if "only emulates the model's bfloat16" in note]
    assert len(told) == is_emulated


@pytest.mark.parametrize(("length", "most"), [(2048, None), (2049, 2048)])
def test_tokens_choose_only_in_rows_longer_than_what_is_chosen(
    length: int, most: int | None
) -> None:
    asked = replace(ASKED, model="deepseek-v3.2", prompt_len=length - 8, gen_len=8)
    problem = stated_question(load_profile("h100"), asked).problem
    assert problem.shape.attention.most_chosen == most
    assert problem.as_cached.shape is problem.shape, "nothing is left to change"


def test_work_is_that_of_a_cache_that_keeps_what_is_seen() -> None:
    asked = replace(ASKED, prompt_len=5000, attention="4+1024")
    workload = stated_question(load_profile("h100"), asked).problem.workload
    assert workload.max_cached_tokens == 4 + 1024 + 511


@pytest.mark.parametrize(
    ("weights", "what_if", "stored", "bits"),
    [
        (None, (), "bfloat16", 16),
        ("int4", (), "packed int4, groups of 64", 4.25),
        (None, ("dram=64GiB", "weights = fp8"), "fp8, blocks of 128 x 128", 8.002),
        (None, ("weights=gptq int4",), "gptq int4, groups of 128", 4.16),
    ],
)
def test_experts_are_supposed_to_be_stored_as_asked(
    weights: str | None, what_if: tuple[str, ...], stored: str, bits: float
) -> None:
    options = replace(ASKED, weights=weights, what_if=what_if)
    options.require_consistent()
    question = stated_question(load_profile("l4"), options)
    shape, dtypes = question.problem.shape, question.problem.dtypes
    assert (str(dtypes.stored), dtypes.compute) == (stored, "bfloat16")
    assert dtypes.expert_bytes(shape) * 8 / shape.expert_params == pytest.approx(bits, rel=1e-3)
    told = any("also published as awq int4 (" in note for note in question.notes)
    assert told == (options.stored is None)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (replace(ASKED, weights="int3"), "--weights"),
        (replace(ASKED, what_if=("weights=int3",)), "--what-if: weights"),
    ],
)
def test_a_format_that_does_not_exist_is_refused(options: PlanOptions, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options.require_consistent()
    (fault,) = caught.value.faults
    assert fault.where == where
    assert fault.message.startswith("no format is named 'int3'; did you mean int8 or int4? 'list' ")


def test_experts_that_cannot_be_grouped_are_not_packed_in_int4(tmp_path: Path) -> None:
    path = tmp_path / "narrow.yaml"
    path.write_text(NARROW)
    options = replace(ASKED, model=str(path), weights="int4")
    with pytest.raises(ConfigError, match="needs widths of experts that are multiples of 32"):
        stated_question(load_profile("l4"), options)
