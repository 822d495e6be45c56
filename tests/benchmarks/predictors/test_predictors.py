"""The benchmarks of predictors and schedules: what they count, and what they make of it."""

from dataclasses import fields

import pytest

from moebatch.schedule.drivers.foresight import LayerForesight
from tests.benchmarks.ablation.pass_trace import PassTrace
from tests.benchmarks.ablation.step_times import StepTimes
from tests.benchmarks.predictors.paper import TRANSFER_RATIO
from tests.benchmarks.predictors.picture import picture
from tests.benchmarks.predictors.rows import Pass, decodes, is_prefill
from tests.benchmarks.predictors.table import FIGURES, shares, table

GOOD = LayerForesight(num_asked=4, num_there=2, num_foreseen=4, num_true=4, num_in_time=4)
BAD = LayerForesight(num_asked=4, num_there=1, num_foreseen=4, num_true=0, num_in_time=2)


def test_passes_of_prompts_and_of_whole_batches_count() -> None:
    def one(decoding: int, prompt_tokens: int, seconds: float) -> Pass:
        return Pass(decoding=decoding, prompt_tokens=prompt_tokens, seconds=seconds)

    passes = [one(0, 9, 1), one(2, 3, 2), one(4, 0, 3), one(2, 0, 4)]
    assert [is_prefill(one) for one in passes] == [True, False, False, False]
    assert decodes(passes, 4) == [3]


def test_all_layers_together_are_weighed_by_what_was_asked() -> None:
    assert shares(FIGURES["accuracy"], {0: GOOD, 1: BAD}) == [0.5, 1.0, 0.0]
    assert "| accuracy | mine | 50.0% | 100.0% | 0.0% |" in table({"mine": {0: GOOD, 1: BAD}})


def test_the_picture_has_a_point_for_every_figure_predictor_and_layer() -> None:
    drawn = picture({"a": {0: GOOD, 1: BAD}, "b": {0: BAD, 1: BAD}}, title="T", subtitle="")
    lines = [line for axes in drawn.figure.axes for line in axes.lines]
    assert len(lines) == 2 * len(FIGURES)
    assert all(len(line.get_xydata()) == 2 for line in lines)


def test_steps_are_compared_round_by_round() -> None:
    names = [field.name for field in fields(PassTrace)]
    trace = PassTrace(**dict.fromkeys(names, 0.0))
    base = StepTimes(rounds_s=(2.0, 4.0, 8.0), num_passes=3, shares={}, trace=trace)
    step = StepTimes(rounds_s=(2.0, 2.0, 2.0), num_passes=3, shares={}, trace=trace)
    assert step.faster_than(base) == (1.0, 2.0, 4.0)


def test_an_expert_weighs_as_much_as_on_the_machine_of_the_paper() -> None:
    assert pytest.approx(2.07, abs=0.01) == TRANSFER_RATIO
