"""Questions about machines and models that need not be here."""

import pytest

from moebatch.formats.plain import BFLOAT16, FLOAT16
from moebatch.plan.options import PlanOptions
from moebatch.plan.question import stated_question
from moebatch.spec.profile import load_profile


@pytest.mark.parametrize(("hardware", "is_emulated"), [("t4", True), ("l4", False)])
def test_a_gpu_without_bfloat16_is_planned_in_float16_and_the_plan_says_why(
    hardware: str, is_emulated: bool
) -> None:
    options = PlanOptions(model="mixtral-8x7b", prompt_len=77, gen_len=128)
    question = stated_question(load_profile(hardware), options)
    assert question.problem.dtypes.stored == (FLOAT16 if is_emulated else BFLOAT16)
    assert not question.problem.dtypes.converts
    told = [note for note in question.notes if "only emulates the model's bfloat16" in note]
    assert len(told) == is_emulated
