"""What the screen says of a plan."""

from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from moebatch.plan import advice
from moebatch.plan.answer import answer_given, answer_milp
from moebatch.plan.expert_choice import Alternative, ExpertChoice
from moebatch.report.plan import plan_views
from moebatch.spec.policy.policy import Placement, Policy
from tests.plan.problems import SMALL, cpu_machine, gpu_machine, problem

POLICY = Policy(
    batch_size=8,
    micro_batch_size=8,
    tokens_per_pass=64,
    num_slots=6,
    num_kv_pages=1000,
    weights=Placement(dram=0.5, disk=0.5),
)


def test_experts_that_others_hardly_beat_are_kept_and_the_screen_says_by_how_much() -> None:
    plainest = Alternative(policy=POLICY, seconds=100.0, num_loads=10, ready=0.5)
    other = replace(plainest, policy=replace(POLICY, cache="lru"), seconds=99.0)
    choice = ExpertChoice(chosen=plainest, alternatives=(other, plainest), depth=2)
    answer = answer_given(problem(shape=SMALL), "small", POLICY, source="policy.yaml")
    shown = "".join(map(text, plan_views(replace(answer, experts=choice))))
    assert "nothing else gains 2%; experts are prefetched up to 2 layers ahead" in shown


def test_one_of_a_thing_is_not_said_in_the_plural() -> None:
    one = replace(
        POLICY, batch_size=1, micro_batch_size=1, tokens_per_pass=1, num_slots=1, num_kv_pages=1
    )
    answer = answer_given(problem(shape=SMALL), "small", one, source="policy.yaml")
    shown = text(next(iter(plan_views(answer))))
    for each in ("1 sequence in 1 micro-batch of 1, up to 1 token a pass", "1 slot,", "(1 page)"):
        assert each in shown


def test_a_lane_binds_only_where_it_is_busy_all_the_time() -> None:
    """Pages of one micro-batch are copied, and go up, in turns; those of several side by side. And
    a disk that passes of few tokens wait for is idle in others, which wait for a CPU."""
    one = replace(
        POLICY,
        weights=Placement(dram=1),
        ffn_on_gpu=True,
        schedule="cgopipe",
        staging=True,
        num_slots=16,
        batching="static",
    )
    mixed = replace(POLICY, batch_size=256, tokens_per_pass=4096)
    found = {}
    for name, machine, policy in (
        ("one", gpu_machine(), one),
        ("several", gpu_machine(), replace(one, micro_batch_size=2)),
        ("mixed", cpu_machine(disk=8e9), mixed),
    ):
        answer = answer_given(problem(machine), name, policy, source="policy.yaml")
        found[name] = (answer.prediction.binds, text(next(iter(plan_views(answer)))))
    assert found["one"][0] == "lanes that wait for each other"
    assert "busiest; lanes wait for each other for" in found["one"][1]
    assert found["several"][0] == "staging"
    assert " binds" in found["several"][1]
    assert "busiest; others bind in other passes" in found["mixed"][1]


def test_a_plan_is_shown_before_what_would_help_is_worked_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[object] = []
    search = advice.best_policy
    monkeypatch.setattr(advice, "best_policy", lambda *of: [searched.append(of), search(*of)][1])
    views = plan_views(answer_milp(problem(shape=SMALL), "small"))
    next(views)
    assert not searched
    assert any("what would help most" in text(view) for view in views)
    assert searched


def text(view: RenderableType) -> str:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(view)
    return shown.get()
