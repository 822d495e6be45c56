"""MoE-Lightning's model gives the policies and throughputs that its authors have published."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import ConfigError, DoesNotFit, ExitCode
from moebatch.layout.lanes import bottleneck
from moebatch.plan.answer import Answer
from moebatch.plan.methods import answer_question
from moebatch.plan.options import PlanOptions
from moebatch.plan.papers.lightning_model import (
    PaperModel,
    PaperPlan,
    PaperPolicy,
    attention_bytes,
    attention_flops,
    ffn_bytes,
)
from moebatch.plan.papers.moe_lightning import (
    MAIN_SETTING,
    SETTINGS,
    PaperSearch,
    micro_batch_grid,
)
from moebatch.plan.question import stated_question
from moebatch.plan.roofline import ffn_flops
from moebatch.schedule.lanes import CPU, GPU, UP
from moebatch.spec.machine.hardware import Hardware, Level, Link, Processor, RateCurve
from moebatch.spec.machine.profile import load_profile
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_shape
from tests.few import examples
from tests.plan.problems import MIXTRAL
from tests.shapes import stored_bytes

GIB = 2**30
MIXTRAL_8X22B = MIXTRAL | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
}
SMALL = read_shape(MIXTRAL, "8x7b")
LARGE = read_shape(MIXTRAL_8X22B, "8x22b")
TINY = read_shape(
    MIXTRAL | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}, "tiny"
)


def processor(peak: float, bandwidth: float) -> Processor:
    return Processor(
        gemm={"bfloat16": RateCurve(points=((1, peak),))},
        bandwidth=bandwidth,
        attention_bandwidth=bandwidth,
        attention_flops=peak,
        elementwise_bandwidth=bandwidth,
    )


def machine(
    *,
    vram: float,
    gpu: Processor,
    cpu: Processor,
    dram: float = 197_880_360_960,
    num_gpus: int = 1,
) -> Hardware:
    levels = [
        Level(name="vram", capacity_bytes=int(vram), num_devices=num_gpus, processor=gpu),
        Level(name="dram", capacity_bytes=int(dram), processor=cpu),
    ]
    return Hardware(
        name="machine.yaml",
        title="of a test",
        levels={level.name: level for level in levels},
        links={"dram->vram": Link(name="dram->vram", bandwidth=16 * GIB)},
    )


L4 = machine(vram=24 * GIB, gpu=processor(104e12, 285 * GIB), cpu=processor(1.6e12, 76 * GIB))
T4 = machine(vram=15 * GIB, gpu=processor(65e12, 300 * GIB), cpu=processor(0.8e12, 76 * GIB))


def t4s(count: int) -> Hardware:
    return machine(
        vram=15 * GIB * count,
        gpu=processor(65e12 * count, 300 * GIB * count),
        cpu=processor(1.6e12, 100 * GIB),
        dram=416 * GIB,
        num_gpus=count,
    )


def model(hardware: Hardware, s: float, n: float, shape: ModelShape = SMALL) -> PaperModel:
    return PaperModel(
        shape=shape,
        expert_bytes=stored_bytes(shape),
        hardware=hardware,
        prompt_tokens=s,
        gen_tokens=n,
    )


def fits(plan: PaperPlan) -> bool:
    return plan.gpu_memory.fits and plan.cpu_memory.fits


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("hardware", "s", "n", "mu", "num_micro_batches", "r_w", "tokens_per_s"),
    [
        (L4, 77, 32, 324, 14, 0.05588, 944.66),
        (T4, 77, 32, 164, 19, 0.0047, 603.3),
        (T4, 77, 64, 164, 19, 0.0047, 593.7),
        (T4, 77, 128, 164, 14, 0.0108, 445.6),
        (T4, 418, 32, 36, 14, 0.0004, 99.1),
        (T4, 418, 64, 36, 14, 0.0004, 97.6),
        (T4, 418, 128, 36, 14, 0.0004, 96.8),
        (T4, 418, 256, 36, 14, 0.0004, 96.4),
        (L4, 256, 50, 100, 15, 0.0506, 307.1),
        (T4, 1984, 64, 4, 19, 0.0273, 14.5),
    ],
)
@pytest.mark.parametrize("choices", [(MAIN_SETTING,), SETTINGS])
def test_published_policies_come_out(
    hardware, s, n, mu, num_micro_batches, r_w, tokens_per_s, choices
):
    plan = PaperSearch(model=model(hardware, s, n), settings=choices).solve()

    policy = plan.policy
    assert (policy.micro_batch_size, policy.num_micro_batches) == (mu, num_micro_batches)
    assert (policy.attention_on_gpu, policy.ffn_on_gpu) == MAIN_SETTING
    assert policy.r_w == pytest.approx(r_w, abs=5e-5)
    assert plan.decode_tokens_per_s == pytest.approx(tokens_per_s, abs=0.06)
    assert fits(plan)


def test_time_of_a_layer_is_the_published_one():
    plan = PaperSearch(model=model(L4, 77, 32)).solve()

    assert plan.busy_s[UP.name] == pytest.approx(0.1549, abs=5e-5)
    assert plan.layer_s == plan.busy_s[UP.name]
    assert bottleneck(plan.busy_s) == UP.name
    assert plan.decode_s == pytest.approx(31 * 32 * plan.busy_s[UP.name])
    assert plan.tokens_per_s == pytest.approx(4536 * 32 / (plan.prefill_s + plan.decode_s))


def test_sizes_of_mixtral():
    small, large = model(L4, 77, 32), model(t4s(4), 77, 32, LARGE)

    assert small.weights_bytes == 2_818_572_288
    assert large.weights_bytes == 4_831_838_208
    assert small.attention_weights_bytes == (4 * 4096**2 + 4 * 4096**2 // 4) * 32
    assert small.kv_bytes(1, 1) == large.kv_bytes(1, 1) == 4096


def test_operations_have_the_intensities_of_the_paper():
    long = 1_000_000

    attention = attention_flops(SMALL, 1, 1, long) / attention_bytes(SMALL, 1, 1, long)
    ffn = ffn_flops(SMALL, 128) / ffn_bytes(SMALL, 128, expert_bytes=stored_bytes(SMALL))

    assert attention == pytest.approx(2.0, abs=0.02)
    assert ffn == pytest.approx(31.95, abs=0.005)


def test_memory_is_counted_as_in_the_paper():
    s, n, mu, count, tp, r_w = 77, 32, 68, 3, 2, 0.1
    batch = mu * count
    hrm = model(t4s(tp), s, n, LARGE)
    policy = PaperPolicy(micro_batch_size=mu, num_micro_batches=count, r_w=r_w)
    layers, h1, h2, h_kv, k, w_e = 56, 6144, 16384, 1024, 2, 4_831_838_208
    w_o = (4 * h1**2 + 4 * h1**2 / 6) * layers
    experts = w_e * layers * r_w
    decode = w_o + experts + 4 * h1 * batch * tp
    prefill = w_o + experts + tp * (4 * h1 * mu * s + 2 * h1 * batch * s) + 8 * s * h_kv * mu
    work = 2.4 * (mu * k * h1 * tp * s + 3 * mu * k * h2 * s)
    buffers = 2 * w_e * (1 - r_w)
    on_cpu = w_e * layers * (1 - r_w) + 4 * (s + n) * h_kv * batch * layers
    on_cpu += 2 * h1 * batch * s * tp + buffers

    assert sum(hrm.home_decode(policy).values()) == pytest.approx(decode)
    assert sum(hrm.home_prefill(policy).values()) == pytest.approx(prefill)
    assert hrm.workspace(policy) == pytest.approx(work)
    gpu, cpu = hrm.on_gpu(policy), hrm.on_cpu(policy)
    assert gpu.total_bytes == pytest.approx(max(decode, prefill) + buffers + work)
    assert cpu.total_bytes == pytest.approx(on_cpu)
    assert gpu.limit_bytes == pytest.approx(0.86 * 2 * 15 * GIB)
    assert cpu.limit_bytes == pytest.approx(0.8 * 416 * GIB)


def test_attention_on_the_gpu_moves_the_cache_that_is_not_there():
    hrm = model(L4, 100, 50)
    policy = PaperPolicy(
        micro_batch_size=4, num_micro_batches=2, r_w=1, r_c=0.25, attention_on_gpu=True
    )

    moved = 0.75 * 8 * 4096 * (100 + 25)
    assert hrm.busy_s(policy)[UP.name] == pytest.approx(moved / (16 * GIB))
    assert hrm.busy_s(policy)[CPU.name] == 0
    ffn_only = hrm.busy_s(replace(policy, attention_on_gpu=False, r_c=0))[GPU.name]
    assert hrm.busy_s(policy)[GPU.name] > ffn_only


def test_a_cpu_that_computes_experts_moves_hidden_states_only():
    hrm = model(L4, 100, 50)
    policy = PaperPolicy(micro_batch_size=4, num_micro_batches=2, r_w=0, ffn_on_gpu=False)

    busy_s = hrm.busy_s(policy)
    assert busy_s[UP.name] == pytest.approx(8 * 2 * 4096 / (16 * GIB))
    assert busy_s[GPU.name] == 0
    assert busy_s[CPU.name] > 2 * SMALL.num_experts * stored_bytes(SMALL) / (76 * GIB)


def test_experts_stay_on_the_cpu_where_the_link_is_hopeless():
    slow = replace(L4, links={"dram->vram": Link(name="dram->vram", bandwidth=1e8)})

    plan = PaperSearch(model=model(slow, 77, 32)).solve()

    assert not plan.policy.ffn_on_gpu
    assert plan.policy.r_w == 0
    assert bottleneck(plan.busy_s) == CPU.name


@pytest.mark.exhaustive
def test_all_weights_stay_on_a_gpu_that_holds_them():
    large = machine(vram=400 * GIB, gpu=processor(600e12, 4e12), cpu=processor(1e12, 100e9))

    plan = PaperSearch(model=model(large, 77, 32)).solve()

    assert plan.policy.r_w == 1
    assert plan.busy_s[UP.name] == 0


@pytest.mark.exhaustive
def test_more_gpus_are_faster_and_fit():
    plans = [PaperSearch(model=model(t4s(count), 77, 64, LARGE)).solve() for count in (2, 4)]

    assert all(fits(plan) for plan in plans)
    assert plans[1].decode_tokens_per_s > plans[0].decode_tokens_per_s


def test_the_grid_is_that_of_the_authors():
    grid = micro_batch_grid()

    assert [next(grid) for _ in range(8)] == [1, 2, 3, 4, 36, 68, 100, 132]


@examples(40)
@given(
    mu=st.integers(1, 400),
    num_micro_batches=st.integers(1, 40),
    setting=st.sampled_from(SETTINGS),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    s=st.integers(8, 1000),
)
def test_no_shares_are_better_than_the_closed_form(mu, num_micro_batches, setting, shares, s):
    hrm = model(L4, s, 32)
    a_g, f_g = setting
    other = PaperPolicy(
        micro_batch_size=mu,
        num_micro_batches=num_micro_batches,
        attention_on_gpu=a_g,
        ffn_on_gpu=f_g,
        r_w=shares[0] * f_g,
        r_c=shares[1] * a_g,
    )

    best = PaperSearch(model=hrm).best_shares(mu, num_micro_batches, setting)

    tried = hrm.evaluate(other)
    if best is None:
        assert not fits(tried)
    elif fits(tried):
        assert hrm.evaluate(best).layer_s <= tried.layer_s * (1 + 1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", SETTINGS)
def test_micro_batches_beyond_those_looked_at_gain_nothing(setting):
    search = PaperSearch(model=model(T4, 200, 32), settings=(setting,))
    looked_at = list(search.candidates())
    best = min(plan.sequence_layer_s for plan in looked_at)

    for mu in (1, 4, 36, 68):
        for num_micro_batches in range(1, 120):
            policy = search.best_shares(mu, num_micro_batches, setting)
            if policy:
                time_s = search.model.evaluate(policy).sequence_layer_s
                assert time_s >= best * (1 - 1e-6)


def test_equal_policies_give_the_smallest_batch():
    search = PaperSearch(model=model(T4, 77, 32))
    plan = search.solve()

    larger = search.best_shares(plan.policy.micro_batch_size, plan.policy.num_micro_batches + 1)
    assert larger is not None
    assert math.isclose(search.model.evaluate(larger).sequence_layer_s, plan.sequence_layer_s)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("s", "n"), [(30, 300), (600, 8)])
def test_sizes_that_are_passed_over_are_not_the_answer(s, n, setting):
    search = PaperSearch(model=model(T4, s, n))
    found = search.solve()

    for mu in micro_batch_grid():
        one = search.best_shares(mu, 1, setting)
        if one is None:
            break
        gain = found.sequence_layer_s / search.model.evaluate(one).sequence_layer_s
        assert gain < 1 - 1e-6 or (gain < 1 + 1e-6 and mu >= found.policy.batch_size)


def test_a_tiny_model_is_planned_in_few_steps_for_a_batch_that_a_policy_can_have(monkeypatch):
    evaluated, evaluate = [], PaperModel.evaluate

    def counted(hrm, policy):
        evaluated.append(policy)
        return evaluate(hrm, policy)

    monkeypatch.setattr(PaperModel, "evaluate", counted)
    plan = PaperSearch(model=model(L4, 2, 2, TINY)).solve()

    assert plan.policy.batch_size <= 2**20
    assert len(evaluated) < 5000


def test_a_model_of_two_layers_has_a_plan_though_buffers_take_as_much_as_all_experts():
    assert fits(PaperSearch(model=model(L4, 77, 128, TINY)).solve())


@pytest.mark.exhaustive
def test_an_answer_of_one_token_has_a_plan():
    plan = PaperSearch(model=model(L4, 77, 1)).solve()

    assert math.isfinite(plan.decode_tokens_per_s)
    assert plan.tokens_per_s > 0


def test_a_machine_without_gpu_is_refused():
    cpu_only = replace(L4, levels={"dram": L4.dram}, links={})

    with pytest.raises(ConfigError, match=r"machine.yaml: levels.vram: .*for a GPU beside a CPU"):
        model(cpu_only, 77, 32)


@pytest.mark.parametrize(
    ("vram", "dram", "level", "term"),
    [(4 * GIB, 184 * GIB, "vram", "weight buffers"), (15 * GIB, 64 * GIB, "dram", "experts")],
)
def test_a_memory_that_is_too_small_is_named(vram, dram, level, term):
    small = machine(vram=vram, dram=dram, gpu=processor(65e12, 320e9), cpu=processor(1e12, 80e9))

    with pytest.raises(DoesNotFit, match=f"^{level}: .*largest term is {term}") as error:
        PaperSearch(model=model(small, 77, 32)).solve()

    assert error.value.exit_code == ExitCode.DOES_NOT_FIT


@pytest.mark.parametrize("stored", [{"weights": "int4"}, {"what_if": ("weights=int4",)}])
def test_experts_in_fewer_bits_are_planned_as_they_are_stored(stored):
    options = PlanOptions(model="mixtral-8x7b", prompt_len=77, gen_len=128, paper=True)
    plain, packed = paper_answer(options), paper_answer(replace(options, **stored))

    assert packed.policy.weights.vram > 0.1 > plain.policy.weights.vram
    assert packed.prediction.decode_tokens_per_s > plain.prediction.decode_tokens_per_s
    told = "by these forms packed int4, groups of 64 is decoded in no time"
    assert [told in one.notes for one in (plain, packed)] == [False, True]
    assert not any("has not been measured" in note for note in packed.notes)


def paper_answer(options: PlanOptions) -> Answer:
    question = stated_question(load_profile("t4-moe-lightning"), options)
    return answer_question(question, options)
