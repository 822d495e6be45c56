"""Shapes: R rows, V vocabulary."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moebatch.engine.sampling import mass
from moebatch.engine.sampling.mass import NOISE_BITS, noise
from moebatch.engine.sampling.penalties import adjust
from moebatch.engine.sampling.sampler import Sampled, Sampler, first_max
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from tests.few import examples

END = 2
GREEDY = Sampling(temperature=0.0)


@dataclass
class Row:
    request: Request
    choice: int = 0
    output_tokens: Sequence[int] = field(default_factory=list)
    constraint: None = None


def row(
    sampling: Sampling = GREEDY,
    *,
    custom_id: str = "a",
    prompt: tuple[int, ...] = (1,),
    output: Sequence[int] = (),
    choice: int = 0,
) -> Row:
    request = Request(index=0, custom_id=custom_id, prompt_tokens=prompt, sampling=sampling)
    return Row(request, choice, list(output))


def sample(logits_RV: Tensor, rows: Sequence[Row], *, job_seed: int = 0) -> list[Sampled]:
    vocab_size = logits_RV.shape[1]
    sampler = Sampler(vocab_size=vocab_size, end_tokens=frozenset({END}), job_seed=job_seed)
    return sampler.sample(logits_RV, rows)


def tokens(logits_RV: Tensor, rows: Sequence[Row]) -> list[int]:
    return [s.token for s in sample(logits_RV, rows)]


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def kept_mass(logits_RV: Tensor, sampling: Sampling) -> Tensor:
    """What a draw under these parameters sees, as float64 probabilities."""
    num_rows = logits_RV.shape[0]
    mass_RV = mass.to_mass(logits_RV, logits_RV.amax(-1), [sampling.temperature] * num_rows)
    mass.keep(
        mass_RV,
        min_ps=[sampling.min_p] * num_rows,
        top_ks=[sampling.top_k] * num_rows,
        top_ps=[sampling.top_p] * num_rows,
    )
    mass_RV = mass_RV.double()
    return mass_RV / mass_RV.sum(-1, keepdim=True)


class TestGreedy:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("vocab_size", [5, 640, 1280, 1281, 3000, 32000])
    def test_takes_the_first_of_the_largest(self, dtype: torch.dtype, vocab_size: int) -> None:
        # Coarse values, so that almost every row has ties.
        logits_RV = random_logits(16, vocab_size, scale=1.0).mul(4).round().to(dtype)
        value_R, column_R = first_max(logits_RV)
        assert column_R.tolist() == logits_RV.float().argmax(-1).tolist()
        assert value_R.tolist() == logits_RV.amax(-1).tolist()
        assert tokens(logits_RV, [row()] * 16) == column_R.tolist()

    @pytest.mark.parametrize("first", [0, 639, 640, 1279, 2000, 2559, 2570])
    def test_ties_go_to_the_lowest_id_wherever_it_lies(self, first: int) -> None:
        logits_RV = torch.full((1, 2600), -4.0, dtype=torch.bfloat16)
        logits_RV[0, [first, 2590, 2599]] = 1.5
        assert tokens(logits_RV, [row()]) == [first]
        assert tokens(logits_RV, [row(replace(GREEDY, logprobs=2))]) == [first]

    def test_a_slice_of_wider_logits_will_do(self) -> None:
        wide_RV = random_logits(4, 4000)
        assert tokens(wide_RV[:, :3000], [row()] * 4) == wide_RV[:, :3000].argmax(-1).tolist()

    def test_no_rows(self) -> None:
        assert sample(torch.empty(0, 10), []) == []

    def test_a_wrong_shape_is_our_mistake(self) -> None:
        with pytest.raises(AssertionError, match=r"logits of \(2, 10\), not \(1, 10\)"):
            Sampler(vocab_size=10, end_tokens=frozenset(), job_seed=0).sample(
                torch.zeros(1, 10), [row(), row()]
            )


class TestBrokenLogits:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(logprobs=1, top_p=0.5)])
    @pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
    @pytest.mark.parametrize("place", [0, 700, 2999])
    def test_one_bad_logit_spoils_its_row_and_no_other(
        self, dtype: torch.dtype, sampling: Sampling, bad: float, place: int
    ) -> None:
        logits_RV = random_logits(3, 3000).to(dtype)
        rows = [row(sampling, custom_id=name) for name in "abc"]
        healthy = sample(logits_RV, rows)
        logits_RV[1, place] = bad
        broken = sample(logits_RV, rows)
        assert [s.finite for s in broken] == [True, False, True]
        assert broken[1] == Sampled(token=-1)
        assert (broken[0], broken[2]) == (healthy[0], healthy[2])

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("change", [{"min_tokens": 1}, {"repetition_penalty": 2.0}])
    def test_nothing_that_is_done_to_logits_hides_a_bad_one(
        self, bad: float, change: dict[str, Any]
    ) -> None:
        logits_RV = torch.zeros(1, 10)
        logits_RV[0, END] = bad
        asked = row(replace(GREEDY, **change), prompt=(END,))
        assert sample(logits_RV, [asked]) == [Sampled(token=-1)]

    @pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
    def test_a_row_without_any_likely_token_is_broken(self, sampling: Sampling) -> None:
        logits_RV = torch.full((2, 2000), -math.inf)
        logits_RV[0, 7] = 0.0
        assert tokens(logits_RV, [row(sampling)] * 2) == [7, -1]

    def test_so_is_one_whose_every_token_is_held_back(self) -> None:
        logits_RV = torch.full((1, 10), -math.inf)
        logits_RV[0, END] = 0.0
        assert sample(logits_RV, [row(Sampling(min_tokens=1, logprobs=1))]) == [Sampled(token=-1)]


class TestAgainstTransformers:
    """The kept set and the probabilities are those of transformers' own processors."""

    @pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
    @pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
    def test_temperature(self, temperature: float, scale: float) -> None:
        logits_RV = random_logits(4, 1000, scale=scale)
        theirs_RV = TemperatureLogitsWarper(temperature)(None, logits_RV.double()).softmax(-1)
        ours_RV = kept_mass(logits_RV, Sampling(temperature=temperature))
        torch.testing.assert_close(ours_RV, theirs_RV, rtol=1e-5, atol=1e-12)

    @pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
    @pytest.mark.parametrize(
        ("sampling", "warper"),
        [
            (Sampling(top_k=1), TopKLogitsWarper(1)),
            (Sampling(top_k=50), TopKLogitsWarper(50)),
            (Sampling(top_k=5000), TopKLogitsWarper(5000)),
            (Sampling(top_p=0.001), TopPLogitsWarper(0.001)),
            (Sampling(top_p=0.5), TopPLogitsWarper(0.5)),
            (Sampling(top_p=0.95), TopPLogitsWarper(0.95)),
            (Sampling(min_p=0.05), MinPLogitsWarper(0.05)),
            (Sampling(min_p=0.9), MinPLogitsWarper(0.9)),
        ],
        ids=lambda value: repr(value) if isinstance(value, float) else None,
    )
    def test_filters(self, sampling: Sampling, warper: TopKLogitsWarper, scale: float) -> None:
        logits_RV = random_logits(4, 2000, scale=scale)
        theirs_RV = warper(None, logits_RV.double()).softmax(-1)
        ours_RV = kept_mass(logits_RV, sampling)
        assert (ours_RV[theirs_RV == 0] == 0).all()
        # A step of mass is 6e-14 of the largest: what is below that is not kept.
        assert (ours_RV[theirs_RV > 1e-12] > 0).all()
        torch.testing.assert_close(ours_RV, theirs_RV, rtol=1e-5, atol=1e-12)

    def test_filters_together(self) -> None:
        logits_RV = random_logits(8, 2000)
        theirs_RV = logits_RV.double()
        for warper in (
            TemperatureLogitsWarper(1.3),
            MinPLogitsWarper(0.01),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.8),
        ):
            theirs_RV = warper(None, theirs_RV)
        ours_RV = kept_mass(logits_RV, Sampling(temperature=1.3, min_p=0.01, top_k=40, top_p=0.8))
        torch.testing.assert_close(ours_RV, theirs_RV.softmax(-1), rtol=1e-5, atol=1e-12)

    def test_top_k_keeps_all_equals_of_the_last(self) -> None:
        logits_RV = torch.tensor([[3.0, 1.0, 2.0, 1.0, 0.0]])
        theirs_RV = TopKLogitsWarper(3)(None, logits_RV).softmax(-1)
        assert torch.equal(kept_mass(logits_RV, Sampling(top_k=3)) > 0, theirs_RV > 0)

    def test_repetition_penalty(self) -> None:
        logits_RV = random_logits(1, 50)
        prompt, output = (*range(4, 40), 5), (5, 46)
        theirs_RV = RepetitionPenaltyLogitsProcessor(1.7)(
            torch.tensor([[*prompt, *output]]), logits_RV.clone()
        )
        biased = row(replace(GREEDY, repetition_penalty=1.7), prompt=prompt, output=output)
        torch.testing.assert_close(adjusted(logits_RV[0], biased), theirs_RV[0])

    @pytest.mark.parametrize("penalty", [1e-320, 1e-300, 1e-38, 1e-20])
    def test_a_tiny_repetition_penalty_is_no_fault_of_the_model(self, penalty: float) -> None:
        sampling = replace(GREEDY, repetition_penalty=penalty, min_tokens=1)
        repeated = row(sampling, prompt=(4, 5, 6, END))
        logits_V = torch.linspace(-2.0, 3.0, 10)
        logits_V[[4, 5, 6]] = torch.tensor([-1.0, 2.5, 0.0])
        adjusted_V = adjusted(logits_V, repeated)
        assert int(adjusted_V.argmax()) == 5
        assert adjusted_V[5].isfinite() and adjusted_V[END] == -torch.inf

    @pytest.mark.parametrize("num_output", [0, 2, 3])
    def test_min_tokens(self, num_output: int) -> None:
        logits_RV = random_logits(1, 50)
        output = list(range(10, 10 + num_output))
        theirs_RV = MinNewTokensLengthLogitsProcessor(1, 3, [END, 7], device="cpu")(
            torch.tensor([[1, *output]]), logits_RV.clone()
        )
        held = row(replace(GREEDY, min_tokens=3, stop_token_ids=frozenset({7})), output=output)
        assert torch.equal(adjusted(logits_RV[0], held), theirs_RV[0])


def adjusted(logits_V: Tensor, which: Row) -> Tensor:
    result_V = logits_V.clone()
    adjust(result_V, which.request, which.output_tokens, frozenset({END}))
    return result_V


class TestPenalties:
    def test_presence_counts_once_and_frequency_each_time_in_the_output_only(self) -> None:
        which = row(
            replace(GREEDY, presence_penalty=0.5, frequency_penalty=0.25),
            prompt=(0, 0),
            output=(3, 1, 3, 3),
        )
        assert adjusted(torch.zeros(5), which).tolist() == [0, -0.75, 0, -1.25, 0]

    def test_negative_penalties_encourage(self) -> None:
        which = row(replace(GREEDY, presence_penalty=-1.0), output=(3,))
        assert adjusted(torch.zeros(5), which).tolist() == [0, 0, 0, 1, 0]

    def test_nothing_to_penalise_yet(self) -> None:
        assert adjusted(torch.ones(3), row(replace(GREEDY, presence_penalty=1.0))).sum() == 3

    def test_logit_bias(self) -> None:
        biased = replace(GREEDY, logit_bias={0: -100.0, 3: 5.0})
        assert adjusted(torch.ones(5), row(biased)).tolist() == [-99, 1, 1, 6, 1]
        assert tokens(torch.ones(1, 5), [row(biased)]) == [3]

    def test_repetition_comes_after_bias_and_before_presence(self) -> None:
        which = row(
            replace(GREEDY, logit_bias={1: 3.0}, repetition_penalty=2.0, presence_penalty=1.0),
            output=(1,),
        )
        assert adjusted(torch.ones(3), which).tolist() == [1, 1, 1]

    def test_bias_does_not_free_what_min_tokens_holds_back(self) -> None:
        which = row(replace(GREEDY, min_tokens=1, logit_bias={END: 100.0}))
        assert tokens(torch.tensor([[0.0, 1.0, 9.0]]), [which]) == [1]

    def test_a_stop_token_beyond_the_vocabulary_is_harmless(self) -> None:
        which = row(replace(GREEDY, min_tokens=1, stop_token_ids=frozenset({3})))
        assert tokens(torch.tensor([[0.0, 1.0, 9.0]]), [which]) == [1]

    def test_the_logits_of_the_caller_stay_as_they_are(self) -> None:
        logits_RV = random_logits(2, 30)
        before_RV = logits_RV.clone()
        sample(logits_RV, [row(Sampling(logit_bias={1: 5.0})), row(Sampling(min_tokens=1))])
        assert torch.equal(logits_RV, before_RV)


class TestTopP:
    def test_keeps_at_least_one(self) -> None:
        kept_RV = kept_mass(torch.tensor([[0.0, 5.0, 1.0]]), Sampling(top_p=1e-9))
        assert kept_RV.tolist() == [[0, 1, 0]]

    def test_is_the_share_of_what_top_k_left(self) -> None:
        logits_RV = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
        kept_RV = kept_mass(logits_RV, Sampling(top_k=2, top_p=0.5))
        assert kept_RV.tolist() == [[1, 0, 0, 0]]

    def test_keeps_all_where_the_last_one_is_needed(self) -> None:
        kept_RV = kept_mass(torch.tensor([[0.5, 0.3, 0.2]]).log(), Sampling(top_p=0.9))
        assert (kept_RV > 0).all()

    def test_equals_share_their_fate(self) -> None:
        kept_RV = kept_mass(torch.zeros(1, 1000), Sampling(top_p=0.3))
        assert (kept_RV > 0).all()

    def test_rows_beyond_the_head_are_sorted(self) -> None:
        flat_V = torch.arange(5000).mul(-1e-4)
        steep_V = torch.arange(5000).mul(-1.0)
        kept_RV = kept_mass(torch.stack((flat_V, steep_V)), Sampling(top_p=0.9))
        p_V = flat_V.double().softmax(-1).cumsum(-1)
        assert (kept_RV[0] > 0).sum() == (p_V < 0.9).sum() + 1
        assert (kept_RV[1] > 0).sum() == 3


class TestDistribution:
    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(),
            Sampling(temperature=0.5),
            Sampling(top_k=4, temperature=1.5),
            Sampling(top_p=0.8),
            Sampling(min_p=0.2, seed=5),
        ],
    )
    def test_draws_follow_the_probabilities(self, sampling: Sampling) -> None:
        num_draws = 8000
        logits_V = random_logits(1, 12, scale=1.0)
        rows = [row(sampling, output=range(position)) for position in range(20)]
        rows = [replace(r, choice=choice) for r in rows for choice in range(num_draws // 20)]
        drawn = torch.tensor(tokens(logits_V.expand(num_draws, -1), rows))
        p_V = kept_mass(logits_V, sampling)[0]
        counts_V = drawn.bincount(minlength=12).double()
        assert counts_V[p_V == 0].sum() == 0
        expected_U = p_V[p_V > 0] * num_draws
        chi_square = ((counts_V[p_V > 0] - expected_U) ** 2 / expected_U).sum()
        # 31.3 is the 99.9 % point for 11 degrees of freedom; the draws are fixed.
        assert chi_square < 31.3

    def test_the_ends_of_the_noise_hit_the_ends_of_the_row(self) -> None:
        mass_RV = torch.tensor([[0, 5, 0, mass.ONE, 1, 0]]).expand(3, -1)
        assert mass.draw(mass_RV, [0, 2 ** (NOISE_BITS - 1), 2**NOISE_BITS - 1]) == [1, 3, 4]
        even_RV = torch.tensor([[0, 1, 0, 1, 0]]).expand(2, -1)
        assert mass.draw(even_RV, [0, 2**NOISE_BITS - 1]) == [1, 3]

    def test_the_largest_vocabulary_does_not_overflow(self) -> None:
        mass_RV = torch.full((1, mass.MAX_VOCAB), mass.ONE)
        assert mass.draw(mass_RV, [2**NOISE_BITS - 1]) == [mass.MAX_VOCAB - 1]


class TestNoise:
    def key(
        self, *, job_seed: int = 0, choice: int = 0, position: int = 0, **request: object
    ) -> int:
        seed, custom_id = request.get("seed"), request.get("custom_id", "a")
        which = row(Sampling(seed=seed), custom_id=custom_id)  # type: ignore[arg-type]
        return noise(which.request, choice=choice, position=position, job_seed=job_seed)

    def test_is_the_same_for_ever(self) -> None:
        assert self.key() == 2703032485611802
        assert self.key(seed=0) == 3676405389019978

    def test_without_a_row_seed_depends_on_all_four(self) -> None:
        keys = [
            self.key(),
            self.key(job_seed=1),
            self.key(choice=1),
            self.key(position=1),
            self.key(custom_id="b"),
            self.key(seed=0),
        ]
        assert len(set(keys)) == len(keys)
        assert all(0 <= key < 2**NOISE_BITS for key in keys)

    def test_a_row_seed_takes_the_place_of_job_seed_and_custom_id(self) -> None:
        assert self.key(seed=3) == self.key(seed=3, custom_id="b", job_seed=1)
        assert self.key(seed=3) != self.key(seed=4)
        assert self.key(seed=3) != self.key(seed=3, choice=1)

    def test_any_string_is_an_id(self) -> None:
        assert self.key(custom_id="\ud800") != self.key(custom_id="")


class TestLogprobs:
    def test_are_those_of_the_raw_distribution(self) -> None:
        logits_RV = random_logits(1, 100)
        raw_V = logits_RV[0].log_softmax(-1)
        asked = Sampling(logprobs=3, temperature=0.1, top_k=5, logit_bias={17: 100.0}, min_tokens=1)
        logprob = sample(logits_RV, [row(asked)])[0].logprob
        assert logprob is not None
        assert logprob.token == 17
        assert logprob.logprob == raw_V[17].item()
        values, ids = raw_V.topk(3)
        assert list(logprob.top.items()) == list(zip(ids.tolist(), values.tolist(), strict=True))

    def test_each_row_gets_as_many_as_it_asks_for(self) -> None:
        rows = [row(replace(GREEDY, logprobs=k)) for k in (0, 2, None, 50)]
        sampled = sample(random_logits(4, 20), rows)
        tops = [s.logprob and len(s.logprob.top) for s in sampled]
        assert tops == [0, 2, None, 20]

    def test_equals_are_listed_by_id(self) -> None:
        logits_RV = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]])
        logprob = sample(logits_RV, [row(replace(GREEDY, logprobs=4))])[0].logprob
        assert logprob is not None
        assert list(logprob.top) == [1, 3, 0, 2]

    @pytest.mark.parametrize(("certain", "next_one"), [(0, 1), (1, 0)])
    def test_a_certain_token(self, certain: int, next_one: int) -> None:
        logits_RV = torch.full((1, 3), -math.inf)
        logits_RV[0, certain] = 0.0
        logprob = sample(logits_RV, [row(Sampling(logprobs=2))])[0].logprob
        assert logprob is not None
        assert logprob.logprob == 0.0
        assert logprob.top == {certain: 0.0, next_one: -math.inf}


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 300]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.sampled_from([None, None, 11]),
    logprobs=st.sampled_from([None, None, 0, 3]),
    min_tokens=st.sampled_from([0, 2]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {}, {3: 4.0, 900: 6.0}]),
)


class TestIndependence:
    """A row gets the same token and logprobs whatever else is in the block."""

    @examples(40)
    @given(
        samplings=st.lists(SAMPLINGS, min_size=2, max_size=24),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        vocab_size=st.sampled_from([1000, 2085]),
        chooser=st.randoms(use_true_random=False),
    )
    def test_of_order_and_of_splitting(
        self, samplings: list[Sampling], dtype: torch.dtype, vocab_size: int, chooser: object
    ) -> None:
        logits_RV = random_logits(len(samplings), vocab_size, seed=len(samplings)).to(dtype)
        rows = [
            row(sampling, custom_id=str(i), output=range(i % 4), choice=i % 3)
            for i, sampling in enumerate(samplings)
        ]
        together = sample(logits_RV, rows)
        alone = [sample(logits_RV[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
        assert alone == together
        order = list(range(len(rows)))
        chooser.shuffle(order)  # type: ignore[attr-defined]
        middle = chooser.randint(1, len(rows) - 1)  # type: ignore[attr-defined]
        shuffled = [
            result
            for part in (order[:middle], order[middle:])
            for result in sample(logits_RV[part], [rows[i] for i in part])
        ]
        assert shuffled == [together[i] for i in order]

    def test_of_groups(self) -> None:
        # So many rows of this width take several groups.
        logits_RV = random_logits(70, 32000).bfloat16()
        rows = [row(Sampling(top_p=0.9), custom_id=str(i)) for i in range(70)]
        together = sample(logits_RV, rows)
        assert together == [sample(logits_RV[i : i + 1], [rows[i]])[0] for i in range(70)]

    def test_mixed_rows_each_get_their_own(self) -> None:
        logits_RV = torch.zeros(4, 1500, dtype=torch.bfloat16)
        logits_RV[:, 40], logits_RV[:, 50] = 30.0, 29.0
        rows = [
            row(),
            row(replace(GREEDY, logit_bias={50: 5.0})),
            row(Sampling(top_k=1)),
            row(replace(GREEDY, min_tokens=1, stop_token_ids=frozenset({40}))),
        ]
        assert tokens(logits_RV, rows) == [40, 50, 40, 50]

    @pytest.mark.parametrize("only", [Sampling(min_p=1.0), Sampling(top_k=1), Sampling(top_p=1e-9)])
    def test_a_filter_holds_beside_rows_that_have_none(self, only: Sampling) -> None:
        logits_RV = random_logits(1, 50, scale=1.0).expand(20, -1)
        rows = [row((Sampling(), only)[i % 2], custom_id=str(i)) for i in range(20)]
        drawn = tokens(logits_RV, rows)
        assert set(drawn[1::2]) == {int(logits_RV[0].argmax())}
        assert len(set(drawn[::2])) > 1

    def test_bfloat16_draws_as_its_float32_copy(self) -> None:
        logits_RV = random_logits(30, 1000).bfloat16()
        rows = [row(Sampling(top_p=0.9, logprobs=1), custom_id=str(i)) for i in range(30)]
        assert sample(logits_RV, rows) == sample(logits_RV.float(), rows)
