"""Klotski's ablation (its Table 3), simulated: RTX 3090, Mixtral-8x7B, 512 in, 32 out, n = 15.

Two of its four rows feed figures, as `rtx3090-klotski.yaml` says: `simple` gives the batch size,
which the paper does not state, and `multi` the rate of matrix products, which nobody has measured
on that machine. `hot` and `klotski` are predictions. At the rate of the data sheet prompts are
cheap, and sharing weights gains more than the paper's 3.19: 5.8 to 12 times.
"""

import math
from functools import cache

import pytest

from moebatch.formats.plain import BFLOAT16
from moebatch.layout.footprint import Dtypes
from moebatch.layout.load import PassLoad
from moebatch.layout.routing import SkewedRouting
from moebatch.plan.problem import Problem
from moebatch.plan.simulation.passes import MicroBatches
from moebatch.plan.simulation.world import SimWorld
from moebatch.schedule.drivers.simulate import simulate
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.models import load_model
from moebatch.spec.policy.policy import Placement, Policy
from moebatch.spec.workload import Workload

PAPER: dict[str, float] = {"simple": 5.721, "multi": 18.24, "hot": 19.074, "klotski": 22.414}
STEPS: tuple[tuple[str, str], ...] = (
    ("multi", "simple"),
    ("hot", "multi"),
    ("klotski", "hot"),
)
PROMPT, ANSWER, NUM_BATCHES = 512, 32, 15
PREFETCH_SPACE = 8
"""Experts for which Klotski keeps room on the GPU."""
NUM_HOT = 2
"""K is as many as a token chooses."""
BATCH_SIZE = 32
"""By which the rate of `rtx3090-klotski` was fitted."""
SKEW = 1.2
"""Of the popularity of experts; assumed."""


@cache
def tokens_per_s(schedule: str, batch_size: int, profile: str) -> float:
    """Generated tokens over the time of prompts and answers; `simple` has one batch in work."""
    num_batches = 1 if schedule == "simple" else NUM_BATCHES
    total = num_batches * batch_size
    problem = Problem(
        shape=load_model("mixtral-8x7b").shape,
        dtypes=Dtypes(stored=BFLOAT16, compute="bfloat16"),
        hardware=load_profile(profile).hardware("achieved"),
        workload=Workload.uniform(prompt_tokens=PROMPT, new_tokens=ANSWER, num_sequences=total),
    )
    policy = Policy(
        batch_size=total,
        micro_batch_size=batch_size,
        tokens_per_pass=total * PROMPT,
        num_slots=PREFETCH_SPACE,
        num_kv_pages=total * 34,
        weights=Placement(dram=1),
        kv_cache=Placement(dram=1),
        attention_on_gpu=True,
        ffn_on_gpu=True,
        schedule=schedule,
        num_hot=NUM_HOT,
    )
    prompts = PassLoad(
        prompt_tokens=batch_size * PROMPT,
        prompt_pairs=batch_size * PROMPT * (PROMPT + 1) / 2,
        logits_rows=batch_size,
    )
    decodes = PassLoad(
        decode_sequences=batch_size,
        decode_positions=batch_size * (PROMPT + ANSWER / 2),
        logits_rows=batch_size,
    )
    world = SimWorld(
        problem,
        policy,
        passes=[
            MicroBatches(loads=(load,) * num_batches, on_cpu=(False,) * num_batches)
            for load in (prompts, decodes)
        ],
        routing=SkewedRouting(shape=problem.shape, exponent=SKEW),
    )
    timeline = simulate(schedule, world.setup, world.room, world, num_passes=3)
    first_s, *_, steady_s = timeline.pass_s
    return total * ANSWER / (first_s + (ANSWER - 1) * steady_s)


def step(after: str, before: str, batch_size: int, profile: str = "rtx3090") -> float:
    """By what factor one schedule is faster than the one before."""
    return tokens_per_s(after, batch_size, profile) / tokens_per_s(before, batch_size, profile)


def test_the_batch_size_is_the_power_of_two_nearest_to_what_the_link_lets_simple_do() -> None:
    shape = load_model("mixtral-8x7b").shape
    dtypes = Dtypes(stored=BFLOAT16, compute="bfloat16")
    num_experts = len(shape.moe_layers) * shape.num_experts
    link = load_profile("rtx3090-klotski").hardware("achieved").links["dram->vram"]
    pass_s = num_experts * dtypes.expert_bytes(shape) / link.bandwidth
    # As many passes as new tokens of each sequence.
    batch_size = PAPER["simple"] * pass_s
    assert batch_size == pytest.approx(30.7, abs=0.05)
    assert 2 ** round(math.log2(batch_size)) == BATCH_SIZE


def test_the_rate_of_the_profile_is_the_one_that_gives_multi() -> None:
    found = tokens_per_s("multi", BATCH_SIZE, "rtx3090-klotski")
    assert found == pytest.approx(PAPER["multi"], rel=0.01)


@pytest.mark.few(batch_size=(16,))
@pytest.mark.parametrize("batch_size", [4, 16, 64])
def test_splitting_off_the_gate_and_turning_experts_around_gain_what_the_paper_says(
    batch_size: int,
) -> None:
    for after, before in STEPS[1:]:
        found = step(after, before, batch_size)
        assert found > 1
        assert found == pytest.approx(PAPER[after] / PAPER[before], rel=0.2)


@pytest.mark.few(1)
@pytest.mark.parametrize(("after", "before"), STEPS)
def test_every_step_gains_what_the_paper_says_under_its_software(after: str, before: str) -> None:
    found = step(after, before, BATCH_SIZE, "rtx3090-klotski")
    assert found > 1
    assert found == pytest.approx(PAPER[after] / PAPER[before], rel=0.2)


@pytest.mark.parametrize("schedule", PAPER)
def test_all_figures_are_those_of_the_paper_under_its_software(schedule: str) -> None:
    found = tokens_per_s(schedule, BATCH_SIZE, "rtx3090-klotski")
    assert found == pytest.approx(PAPER[schedule], rel=0.2)


@pytest.mark.exhaustive
def test_sharing_weights_gains_less_the_larger_the_batches() -> None:
    gains = [step("multi", "simple", batch_size) for batch_size in (4, 16, 64)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 3 * PAPER["multi"] / PAPER["simple"]
