"""Plans whose weights outside experts come up with their layers."""

from dataclasses import replace

import pytest

from moebatch.errors import DoesNotFit
from moebatch.plan.problem import Problem
from moebatch.plan.runnable import not_runnable
from moebatch.plan.search.planner import best_policy
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.models import load_model
from moebatch.spec.workload import Workload
from tests.plan.problems import problem

WORK = Workload.uniform(prompt_tokens=512, new_tokens=256, num_sequences=2000)


def asked(machine: str, model: str) -> Problem:
    return problem(load_profile(machine).hardware(), shape=load_model(model).shape, workload=WORK)


@pytest.mark.parametrize("machine", ["t4", "rtx4090"])
def test_a_model_whose_attention_is_larger_than_the_gpu_is_planned(machine: str) -> None:
    question = asked(machine, "deepseek-v3")
    policy = best_policy(question).policy
    assert policy.streamed_layers == 60
    assert question.fits(policy)
    assert not [*not_runnable(question, policy)]
    footprint = question.footprints(replace(policy, streamed_layers=0))["vram"]
    assert footprint.total_bytes > question.capacity_bytes("vram")


def test_small_weights_outside_experts_stay() -> None:
    assert best_policy(asked("rtx4090", "mixtral-8x7b")).policy.streamed_layers == 0


def test_bringing_layers_takes_the_link_so_much_longer() -> None:
    question = asked("rtx4090", "mixtral-8x7b")
    policy = best_policy(question).policy
    load = next(iter(best_policy(question).candidates)).candidate.phases[0].load
    stay, come = (
        question.cost_of(load, replace(policy, streamed_layers=count)).lanes["dram->vram"]
        for count in (0, 30)
    )
    shape, link = question.shape, question.hardware.links["dram->vram"]
    num_bytes = 2 * sum(shape.streamed_params[layer] for layer in shape.streamed(30))
    assert come - stay == pytest.approx(num_bytes / link.bandwidth, rel=1e-3)


def test_what_no_model_has_is_refused() -> None:
    question = asked("rtx4090", "mixtral-8x7b")
    policy = replace(best_policy(question).policy, streamed_layers=33)
    assert dict(not_runnable(question, policy)) == {
        "streamed_layers": "is 33, the model has 32 layers"
    }


def test_layers_of_an_encoder_stay() -> None:
    question = asked("t4", "switch-base-8")
    assert question.most_streamed_layers == 0
    policy = replace(best_policy(question).policy, streamed_layers=3)
    assert "streamed_layers" in dict(not_runnable(question, policy))


def test_a_machine_too_small_for_embeddings_is_refused_as_one() -> None:
    small = asked("t4", "deepseek-v3").with_capacity("vram", 2**31)
    with pytest.raises(DoesNotFit, match="vram: needs"):
        best_policy(small)
