"""Predictions against what was measured: every saved policy that comes with a published speed."""

from dataclasses import replace

import pytest

from moebatch.formats.plain import FLOAT16
from moebatch.layout.footprint import Dtypes
from moebatch.layout.ladder import Ladder
from moebatch.layout.load import PassLoad
from moebatch.plan.prediction import Prediction, predict
from moebatch.plan.pricing.prices import Prices
from moebatch.plan.pricing.task_prices import TaskPrices
from moebatch.plan.problem import Problem
from moebatch.spec.files.library import names
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.models import load_model
from moebatch.spec.policy.file import PolicyFile, load_policy

TOLERANCE = 0.25
OUTSIDE = {
    "moe-lightning-t4-mtbench-32-unpadded": 1.35,
    "moe-lightning-t4-mtbench-64-unpadded": 1.16,
    "moe-lightning-t4-mtbench-128-unpadded": 1.46,
    "moe-lightning-t4-mtbench-256-unpadded": 1.13,
}
"""Predicted over measured where the results themselves are at odds: short prompts take nearly twice
as long per token there as long ones elsewhere. They are held to where they are now."""
SYSTEMS = ("flexgen-c", "flexgen", "moe-lightning")
"""From slow to fast."""
WORKLOADS = ("mtbench-32", "mtbench-64", "mtbench-128", "mtbench-256", "synthetic", "summarization")
PUBLISHED = [name for name in names("saved") if "tokens_per_s" in load_policy(name).published]


def predicted(saved: PolicyFile, *, hardware: str | None = None) -> Prediction:
    """On the machine that the file names, in its measured figures."""
    assert saved.workload is not None
    asked = Problem(
        shape=load_model(saved.model).shape,
        dtypes=Dtypes(stored=FLOAT16, compute="float16"),
        hardware=load_profile(hardware or saved.hardware).hardware("achieved"),
        workload=saved.workload,
    )
    policy = saved.policy.resolve(saved.workload, num_experts=asked.num_experts)
    return predict(asked, policy)


def ratio(name: str) -> float:
    saved = load_policy(name)
    return predicted(saved).tokens_per_s / float(saved.published["tokens_per_s"])


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in OUTSIDE])
def test_predictions_are_near_what_was_measured(name: str) -> None:
    assert ratio(name) == pytest.approx(1, abs=TOLERANCE)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_several_gpus_add_up_what_each_has_computed(devices: int) -> None:
    """In a ring: 2 (n - 1) / n of the hidden states leave each, and as many come."""
    hardware = load_profile("2xt4").hardware()
    assert hardware.vram is not None
    vram = replace(hardware.vram, num_devices=devices)
    hardware = replace(hardware, levels={**hardware.levels, "vram": vram})
    dtypes = Dtypes(stored=FLOAT16, compute="float16")
    shape = load_model("mixtral-8x22b").shape
    prices = Prices(shape=shape, dtypes=dtypes, hardware=hardware, ladder=Ladder.of(hardware))
    saved = load_policy("moe-lightning-2xt4-mtbench-64")
    assert saved.workload is not None
    policy = saved.policy.resolve(saved.workload, num_experts=shape.num_layers * shape.num_experts)
    load = PassLoad(decode_sequences=36, decode_positions=36 * 450)
    of_each = 2 * (devices - 1) / devices * 36 * shape.hidden_size * 2
    rate = hardware.links["dram->vram"].bandwidth / devices
    priced = TaskPrices(prices=prices, policy=policy)
    assert priced.shared_s(load) == pytest.approx(2 * of_each / rate)


def test_two_gpus_are_predicted_within_a_fifth_of_what_was_measured() -> None:
    """One host feeds both: 1.34 times too fast where each has a host of its own."""
    assert ratio("moe-lightning-2xt4-mtbench-64") == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_is_not_understood_stays_as_far_off_as_its_note_says(name: str) -> None:
    assert ratio(name) == pytest.approx(OUTSIDE[name], abs=0.02)
    percent = round(100 * (OUTSIDE[name] - 1))
    assert load_policy(name).note.startswith(f"Predicted {percent} % too fast")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_systems_are_in_the_measured_order(workload: str) -> None:
    saved = [load_policy(f"{system}-t4-{workload}") for system in SYSTEMS]
    measured = [float(file.published.get("tokens_per_s", 0)) for file in saved]
    speeds = [predicted(file).tokens_per_s for file in saved]
    assert measured == sorted(measured)
    assert speeds == sorted(speeds)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_way_of_working_alone_puts_moe_lightning_first(workload: str) -> None:
    """All on the machine as MoE-Lightning's copies and kernels use it."""
    saved = [load_policy(f"{system}-t4-{workload}") for system in SYSTEMS]
    speeds = [predicted(file, hardware="t4-moe-lightning").tokens_per_s for file in saved]
    assert max(speeds[:2]) < speeds[2]


def test_a_larger_batch_makes_flexgen_faster_with_the_same_micro_batch() -> None:
    small, large = (
        predicted(load_policy(f"flexgen-t4-mtbench-128-batch-{size}")) for size in (504, 1116)
    )
    assert small.tokens_per_s < large.tokens_per_s
    assert large.tokens_per_s < predicted(load_policy("moe-lightning-t4-mtbench-128")).tokens_per_s


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_policies_fit_their_machines(name: str) -> None:
    """FlexGen's shares are of all weights. Here they are of experts, and all other weights are on
    the GPU beside them, so what filled the GPU there is a little more than it here."""
    prediction = predicted(load_policy(name))
    slack = 1.1 if name.startswith("flexgen") else 1.0
    for level, num_bytes in prediction.peak_bytes.items():
        most = prediction.capacity_bytes[level] * (slack if level == "vram" else 1.0)
        assert num_bytes <= most, level
