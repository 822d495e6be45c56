"""Policies stay within budgets, use them, and refuse with figures when nothing fits."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebatch.errors import DoesNotFit, ExitCode
from moebatch.plan.fit import Fit
from moebatch.plan.footprint import Dtypes
from moebatch.spec.policy import PAGE_TOKENS
from moebatch.spec.shape import ModelShape
from moebatch.spec.workload import Workload

GIB = 2**30
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}
SHAPE = ModelShape.from_config(MIXTRAL, "config.json")
WORKLOAD = Workload(
    num_sequences=5000, mean_prompt_tokens=77, mean_new_tokens=128, max_total_tokens=546
)


def fit(budget: float, *, workload: Workload = WORKLOAD, dtypes: Dtypes | None = None) -> Fit:
    return Fit(
        shape=SHAPE,
        dtypes=dtypes or Dtypes(stored_bytes=2, compute_bytes=2),
        workload=workload,
        program_bytes=300 * 2**20,
        budget_bytes=int(budget * GIB),
    )


@given(
    budget=st.floats(1, 200),
    sequences=st.integers(1, 10**6),
    prompt=st.integers(1, 4000),
    new=st.integers(1, 4000),
    compute=st.sampled_from([2, 4]),
)
def test_a_policy_fits_and_holds_the_longest_sequence(
    budget: float, sequences: int, prompt: int, new: int, compute: int
) -> None:
    workload = Workload(
        num_sequences=sequences,
        mean_prompt_tokens=prompt,
        mean_new_tokens=new,
        max_total_tokens=2 * (prompt + new),
    )
    chosen = fit(budget, workload=workload, dtypes=Dtypes(stored_bytes=2, compute_bytes=compute))
    try:
        policy = chosen.policy()
    except DoesNotFit:
        return
    assert chosen.footprint(policy).total_bytes <= chosen.budget_bytes
    assert policy.num_kv_pages * PAGE_TOKENS >= workload.max_total_tokens
    assert policy.batch_size <= min(sequences, policy.tokens_per_pass)
    assert policy.num_slots >= 1 or policy.num_resident == 32 * 8


@given(small=st.floats(6, 100), more=st.floats(0, 100))
def test_more_memory_never_means_fewer_sequences_or_residents(small: float, more: float) -> None:
    before, after = fit(small).policy(), fit(small + more).policy()
    assert after.batch_size >= before.batch_size
    # Once nothing is streamed, a somewhat smaller cache is the better bargain.
    assert after.num_kv_pages >= before.num_kv_pages or after.num_slots == 0
    assert after.num_resident >= before.num_resident


def test_with_room_for_all_nothing_is_streamed() -> None:
    policy = fit(110).policy()
    assert (policy.num_resident, policy.num_slots) == (256, 0)


def test_few_rows_leave_the_memory_to_experts() -> None:
    few = fit(16, workload=replace(WORKLOAD, num_sequences=4)).policy()
    many = fit(16).policy()
    assert few.batch_size == 4
    assert few.num_resident > many.num_resident


def test_refusal_names_level_need_have_largest_term_and_a_way_out() -> None:
    with pytest.raises(DoesNotFit) as caught:
        fit(2).policy()
    message = str(caught.value)
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
    assert re.search(r"dram: needs .* GiB at the least, has 2.00 GiB", message)
    assert "Largest term: weights outside experts" in message
    smallest = re.search(r"resources.dram: (\d+)MiB", message)
    assert smallest is not None
    fit(int(smallest[1]) / 1024).policy()
    with pytest.raises(DoesNotFit):
        fit((int(smallest[1]) - 1) / 1024).policy()


def test_a_refusal_because_of_long_rows_says_what_would_shorten_them() -> None:
    long = replace(WORKLOAD, max_total_tokens=10**6)
    with pytest.raises(DoesNotFit, match=r"keys and values, .*; lower max_tokens"):
        fit(20, workload=long).policy()
