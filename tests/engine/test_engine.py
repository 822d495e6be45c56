"""Greedy tokens equal those of transformers, whatever the policy is."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.batcher import Batcher
from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.progress.course import Course
from moebatch.engine.spec import EngineSpec
from moebatch.engine.tail import Tail
from moebatch.errors import CheckpointError, OutOfMemory, Stopped
from moebatch.schedule.task import Kind
from moebatch.spec.policy.policy import Placement, Policy, pages_of
from moebatch.spec.request import Outcome, Request
from moebatch.spec.sampling import Sampling
from tests.model.oracle import greedy, greedy_answers, load
from tests.tiny import FAMILIES

LENGTHS = (1, 12, 17, 40, 3, 96, 16, 2, 33, 8)
NEW_TOKENS = 5


class TokenText:
    """Tokens as text: one letter each."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(256 + token) for token in tokens)


def policy(*, resident: float = 0.3, **changes: int) -> Policy:
    usual = {
        "batch_size": 8,
        "micro_batch_size": 4,
        "tokens_per_pass": 64,
        "num_slots": 3,
        "num_kv_pages": 60,
    }
    weights = Placement(dram=resident, disk=1 - resident)
    return Policy(weights=weights, **{**usual, **changes})


def requests(lengths: Sequence[int] = LENGTHS, **sampling: object) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    settings = {"temperature": 0.0, "max_tokens": NEW_TOKENS, **sampling}
    return [
        Request(
            index=i,
            custom_id=f"row-{i}",
            prompt_tokens=tuple(torch.randint(3, 320, (n,), generator=generator).tolist()),
            sampling=Sampling(**settings),
        )
        for i, n in enumerate(lengths)
    ]


@contextmanager
def engine(
    folder: Path,
    chosen: Policy,
    *,
    dtype: str = "float32",
    end_tokens: frozenset[int] | None = None,
    max_tokens: int = 512,
    num_traced_passes: int = 0,
) -> Iterator[BuiltEngine]:
    built = build_engine(
        EngineSpec(
            files=open_model(folder, dtype),
            policy=chosen,
            max_tokens=max_tokens,
            num_traced_passes=num_traced_passes,
        ),
        decoder=TokenText(),
        end_tokens=end_tokens or frozenset(),
        job_seed=0,
    )
    try:
        with torch.inference_mode():
            yield built
    finally:
        built.close()


def run(folder: Path, chosen: Policy, rows: Sequence[Request], **options: object) -> list[Outcome]:
    """Outcomes in input order, after checks of everything that owns something."""
    with engine(folder, chosen, **options) as built:
        outcomes = list(built.engine.run(rows))
        built.check_integrity()
        assert built.cache.first.num_free == built.cache.first.num_pages
    return sorted(outcomes, key=lambda outcome: outcome.request.index)


def tokens_of(outcomes: Sequence[Outcome]) -> list[tuple[int, ...]]:
    return [choice.tokens for outcome in outcomes for choice in outcome.choices]


POLICIES = {
    "usual": policy(),
    "one slot, one sequence": policy(batch_size=1, num_slots=1, resident=0),
    "two slots": policy(num_slots=2, resident=0),
    "everything resident": policy(num_slots=0, resident=1),
    "more slots than experts": policy(num_slots=40, resident=0),
    "prompts in small slices": policy(tokens_per_pass=9, batch_size=3),
    "all at once": policy(batch_size=10, tokens_per_pass=1000, micro_batch_size=100),
    "micro-batches of one": policy(micro_batch_size=1),
    "cache so small that sequences are sent back": policy(num_kv_pages=pages_of(96 + NEW_TOKENS)),
}


_DIFFERENT = ("usual", "one slot, one sequence", "all at once")
"""For families after the first one: they differ in arithmetic, policies in order."""
CASES = [
    (family, name)
    for family in FAMILIES
    for name in POLICIES
    if family == next(iter(FAMILIES)) or name in _DIFFERENT
]


@pytest.mark.few(12)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_equals_transformers_whatever_the_policy(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    family: str,
    name: str,
) -> None:
    folder = tiny_checkpoint(family)
    assert tokens_of(run(folder, POLICIES[name], requests())) == expected(family)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_experts_are_converted_when_they_are_computed_in_another_dtype(
    tiny_checkpoint: Callable[..., Path], stored: str
) -> None:
    folder = tiny_checkpoint("qwen2_moe", dtype=stored)
    model, rows = load(folder, "float32"), requests()
    expected = greedy_answers(model, rows, NEW_TOKENS)
    assert tokens_of(run(folder, policy(), rows, dtype="float32")) == expected


def test_float16_gives_mostly_the_tokens_of_transformers(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """Rounding differs in the last bit, so a text may take another turn where two are close."""
    folder = tiny_checkpoint("mixtral", dtype="float16")
    model, rows = load(folder, "float16"), requests()
    expected = [greedy(model, row.prompt_tokens, 4)[0] for row in rows]
    found = [choice[:4] for choice in tokens_of(run(folder, policy(), rows, dtype="auto"))]
    same = sum(list(theirs) == list(ours) for theirs, ours in zip(expected, found, strict=True))
    assert same >= 7


@pytest.mark.parametrize("tokens_per_pass", [2000, 600])
def test_a_slice_longer_than_a_micro_batch_is_attended_in_pieces(
    tiny_checkpoint: Callable[..., Path], tokens_per_pass: int
) -> None:
    folder = tiny_checkpoint("qwen3_moe", max_position_embeddings=2048)
    rows = requests([1300, 7, 530])
    chosen = policy(tokens_per_pass=tokens_per_pass, num_kv_pages=200)
    model = load(folder)
    expected = greedy_answers(model, rows, NEW_TOKENS)
    with engine(folder, chosen, max_tokens=1400) as built:
        outcomes = sorted(built.engine.run(rows), key=lambda outcome: outcome.request.index)
    assert tokens_of(outcomes) == expected


def test_a_row_alone_and_among_hundreds_gets_the_same_answer(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    folder = tiny_checkpoint("qwen3_moe")
    rows = requests((1, 5, 17, 40, 3, 30, 16, 2, 33, 8) * 40, max_tokens=3)
    together = run(folder, policy(batch_size=100, tokens_per_pass=400, num_kv_pages=700), rows)
    for i in (0, 7, 203, 399):
        alone = run(folder, policy(), [rows[i]])
        assert tokens_of(alone) == tokens_of([together[i]])


def test_sampled_answers_do_not_depend_on_batch_or_order(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    folder = tiny_checkpoint("olmoe")
    rows = requests(temperature=0.9, top_p=0.95, n=2)
    usual = run(folder, policy(), rows)
    backwards = run(folder, policy(batch_size=3, micro_batch_size=1), rows[::-1])
    assert tokens_of(usual) == tokens_of(backwards)
    first, second = usual[3].choices
    assert first.tokens != second.tokens


def test_sequences_that_are_sent_back_are_counted(tiny_checkpoint: Callable[..., Path]) -> None:
    # Answers end early at first, so the engine admits more than can stay.
    folder = tiny_checkpoint("mixtral")
    rows = requests([4] * 40, max_tokens=60, stop_token_ids=frozenset(range(320))) + [
        Request(
            index=40 + row.index,
            custom_id=row.custom_id,
            prompt_tokens=row.prompt_tokens,
            sampling=Sampling(temperature=0, max_tokens=60),
        )
        for row in requests([4] * 8)
    ]
    with engine(folder, policy(num_kv_pages=12)) as built:
        outcomes = list(built.engine.run(rows))
        assert built.engine.statistics.num_preempted > 0
    plenty = run(folder, policy(num_kv_pages=100), rows)
    assert tokens_of(sorted(outcomes, key=lambda o: o.request.index)) == tokens_of(plenty)


def test_ends_at_end_tokens_stop_tokens_and_stop_texts(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
) -> None:
    folder, full = tiny_checkpoint("mixtral"), expected("mixtral")[4]
    end = full[4]
    place = full.index(end)
    by_end, by_stop, by_text, ignoring = (
        run(folder, policy(), requests(**sampling), end_tokens=ends)[4].choices[0]
        for sampling, ends in (
            ({}, frozenset({end})),
            ({"stop_token_ids": frozenset({end})}, None),
            ({"stop": (chr(256 + end),)}, None),
            ({"ignore_eos": True}, frozenset({end})),
        )
    )
    text = TokenText().decode(full[:place])
    for choice, stop_reason in ((by_end, None), (by_stop, end), (by_text, chr(256 + end))):
        assert choice.tokens == full[: place + 1]
        assert (choice.text, choice.finish_reason) == (text, "stop")
        assert choice.stop_reason == stop_reason
    assert (ignoring.tokens, ignoring.finish_reason) == (full, "length")


def test_a_request_that_can_never_fit_is_an_error_and_the_others_are_answered(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    rows = requests([3, 90, 4])
    outcomes = run(tiny_checkpoint("mixtral"), policy(num_kv_pages=3), rows)
    assert outcomes[1].error is not None
    assert outcomes[1].error.code == "kv_cache_exceeded"
    assert f"need {90 + NEW_TOKENS} tokens of keys and values, the memory budget holds 48" in (
        outcomes[1].error.message
    )
    assert [len(outcomes[i].choices) for i in (0, 2)] == [1, 1]


def test_a_row_with_broken_logits_fails_alone(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moebatch.model.decoder import Decoder

    rows, embed = requests(n=2, temperature=0.5), Decoder.embed
    poison = rows[3].prompt_tokens[-1]

    def broken_embed(self: Decoder, tokens_T: torch.Tensor, prompts: list[slice]) -> torch.Tensor:
        x_TD = embed(self, tokens_T, prompts)
        x_TD[tokens_T == poison] = torch.nan
        return x_TD

    folder = tiny_checkpoint("mixtral")
    healthy = run(folder, policy(), rows)
    monkeypatch.setattr(Decoder, "embed", broken_embed)
    for outcome, before in zip(run(folder, policy(), rows), healthy, strict=True):
        tokens = {t for c in before.choices for t in c.tokens} | {*before.request.prompt_tokens}
        if poison in tokens:
            assert outcome.error is not None and outcome.error.code == "nan_logits"
            assert outcome.error.message.endswith("first seen in layer 0, attention")
        else:
            assert tokens_of([outcome]) == tokens_of([before])


def test_a_row_whose_choices_all_break_in_one_pass_fails_once(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moebatch.model.decoder import Decoder

    rows, logits = requests([3, 5], n=3, temperature=0.5), Decoder.logits

    def broken_logits(self: Decoder, x_TD: torch.Tensor) -> torch.Tensor:
        return logits(self, x_TD) * torch.nan

    monkeypatch.setattr(Decoder, "logits", broken_logits)
    outcomes = run(tiny_checkpoint("mixtral"), policy(), rows)
    assert [each.error.code for each in outcomes if each.error] == ["nan_logits"] * 2


@pytest.mark.few
@pytest.mark.parametrize("step", ["attend", "run_experts", "logits"])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_when_memory_is_refused_passes_shrink_and_answers_stay_the_same(
    tiny_checkpoint: Callable[..., Path],
    expected: Callable[[str], list[tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    num_slots: int,
) -> None:
    from moebatch.model.decoder import Decoder

    refusals = iter([False] * 5 + [True] + [False] * 3 + [True] * 2 + [False] * 10**6)
    real = getattr(Decoder, step)

    def refusing(self: Decoder, *arguments: object) -> object:
        if next(refusals):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes")
        return real(self, *arguments)

    monkeypatch.setattr(Decoder, step, refusing)
    folder = tiny_checkpoint("mixtral")
    with engine(folder, policy(num_slots=num_slots, resident=0)) as built:
        outcomes = sorted(built.engine.run(requests()), key=lambda o: o.request.index)
        assert built.engine.statistics.num_shrunk == 3
        built.check_integrity()
    assert tokens_of(outcomes) == expected("mixtral")


@pytest.mark.parametrize(("step", "refused"), [("embed", 3), ("attend", 5), ("logits", 3)])
def test_passes_are_logged_as_they_are_timed_when_memory_is_refused(
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    refused: int,
) -> None:
    """Else a picture holds them against a simulation of other passes."""
    from moebatch.model.decoder import Decoder

    calls, real = count(1), getattr(Decoder, step)

    def refusing(self: Decoder, *arguments: object) -> object:
        if next(calls) == refused:
            raise MemoryError("7 bytes")
        return real(self, *arguments)

    monkeypatch.setattr(Decoder, step, refusing)
    with engine(tiny_checkpoint("mixtral"), policy(), num_traced_passes=1000) as built:
        list(built.engine.run(requests()))
        assert built.engine.statistics.num_shrunk == 1
        assert built.recorder is not None and built.log is not None
        timeline = built.recorder.timeline
    attended = [span.end_s for span in timeline.spans if span.task.kind is Kind.ATTEND]
    ends = [0.0, *timeline.pass_ends_s]
    measured = [sum(a < end <= b for end in attended) for a, b in pairwise(ends)]
    logged = [len(each.loads) * timeline.num_layers for each in built.log.passes]
    assert measured == logged


@pytest.mark.parametrize(("tokens_per_pass", "smallest"), [(64, "8 tokens"), (1, "1 token")])
def test_when_memory_is_always_refused_the_run_ends_and_says_for_how_small_a_pass(
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tokens_per_pass: int,
    smallest: str,
) -> None:
    from moebatch.model.decoder import Decoder

    def refuse(self: Decoder, *arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Decoder, "attend", refuse)
    small = policy(tokens_per_pass=tokens_per_pass, batch_size=min(8, tokens_per_pass))
    with pytest.raises(OutOfMemory, match=f"even for a pass of {smallest}: MemoryError; lower"):
        run(tiny_checkpoint("mixtral"), small, requests([40]))


def test_when_memory_is_refused_where_the_schedule_begins_anew_a_smaller_plan_may_help(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moebatch.engine.passes.guesses import Guesses
    from moebatch.model.decoder import Decoder

    def refuse(*arguments: object) -> None:
        raise MemoryError("7 bytes")

    with engine(tiny_checkpoint("mixtral"), policy()) as built:
        monkeypatch.setattr(Decoder, "attend", refuse)
        monkeypatch.setattr(Guesses, "ranked", refuse)
        with pytest.raises(OutOfMemory, match="refuses memory between passes: 7 bytes"):
            list(built.engine.run(requests()))


@pytest.mark.parametrize(("owner", "step"), [(Batcher, "next_pass"), (Tail, "after_pass")])
def test_when_memory_is_refused_between_passes_a_smaller_plan_may_help(
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    owner: type[object],
    step: str,
) -> None:
    def refuse(*arguments: object) -> None:
        raise MemoryError("7 bytes")

    with engine(tiny_checkpoint("mixtral"), policy()) as built:
        monkeypatch.setattr(owner, step, refuse)
        with pytest.raises(OutOfMemory, match="refuses memory between passes: 7 bytes"):
            list(built.engine.run(requests()))


@pytest.mark.parametrize("refused", [1, 7, 9])
def test_when_memory_is_refused_for_a_text_its_row_goes_on_as_if_it_had_not_been(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """Each of four tokens is decoded twice as it comes, and the whole text at the end."""
    folder, rows = tiny_checkpoint("mixtral"), requests([12], max_tokens=4, stop=("none such",))
    whole = run(folder, policy(), rows)
    calls, real = count(1), TokenText.decode

    def refusing(self: TokenText, tokens: Sequence[int]) -> str:
        if next(calls) == refused:
            raise MemoryError("7 bytes")
        return real(self, tokens)

    monkeypatch.setattr(TokenText, "decode", refusing)
    with engine(folder, policy()) as built:
        with pytest.raises(OutOfMemory, match="refuses memory between passes: 7 bytes"):
            list(built.engine.run(rows))
        ((request, begun),) = built.engine.unfinished()
    (outcome,) = run(folder, policy(), [replace(request, begun=begun)])
    assert outcome.choices == whole[0].choices


def test_what_has_ended_in_a_pass_that_is_given_up_is_not_lost(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of one sequence at a time: the first one gets its last token, the second none."""
    from moebatch.model.decoder import Decoder

    folder = tiny_checkpoint("mixtral")
    rows = requests([3] * 16, max_tokens=1, logprobs=0)
    (whole, *_) = run(folder, policy(batch_size=16), rows)
    calls = iter([True] * 3 + [False] + [True])
    real = Decoder.logits

    def refusing(self: Decoder, x_TD: torch.Tensor) -> torch.Tensor:
        if next(calls):
            raise MemoryError("7 bytes")
        return real(self, x_TD)

    monkeypatch.setattr(Decoder, "logits_rows", 1)
    monkeypatch.setattr(Decoder, "logits", refusing)
    with engine(folder, policy(batch_size=16)) as built:
        with pytest.raises(OutOfMemory):
            list(built.engine.run(rows))
        ((request, (begun,)),) = built.engine.unfinished()
    (choice,) = whole.choices
    assert request == rows[0]
    assert begun.tokens == choice.tokens
    assert [each.token for each in begun.logprobs] == list(choice.tokens)


def test_what_came_before_the_first_pass_does_not_count_as_its_time(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    now_s = [0.0]
    with engine(tiny_checkpoint("mixtral"), policy()) as built:
        built.engine.course = Course(lambda: now_s[0])
        now_s[0] = 100.0
        list(built.engine.run(requests([3])))
    assert {each.seconds for each in built.engine.course.passes} == {0.0}


def test_answers_that_have_ended_tell_how_long_others_become(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    rows = requests([3] * 30, max_tokens=60, stop_token_ids=frozenset(range(320)))
    with engine(tiny_checkpoint("mixtral"), policy()) as built:
        list(built.engine.run(rows))
    _, new = built.engine.course.endings.expected_new([], np.full(30, 60))
    assert new.mean() < 5


@pytest.mark.parametrize("is_last", [False, True])
def test_a_stop_in_the_pass_in_which_the_last_row_ends_stops_nothing(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    """Its text is decoded once: before, there is another row to compute."""
    folder, rows = tiny_checkpoint("mixtral"), requests([12, 3], max_tokens=2)
    whole, real = run(folder, policy(batch_size=1), rows), TokenText.decode
    with engine(folder, policy(batch_size=1)) as built:
        is_asked = iter([not is_last, is_last])

        def asking(self: TokenText, tokens: Sequence[int]) -> str:
            if next(is_asked):
                built.engine.interrupt(Stopped("SIGTERM"))
            return real(self, tokens)

        monkeypatch.setattr(TokenText, "decode", asking)
        found: list[Outcome] = []
        with nullcontext() if is_last else pytest.raises(Stopped):
            found.extend(built.engine.run(rows))
    assert tokens_of(found) == tokens_of(whole[: 1 + is_last])


def test_a_broken_expert_is_named(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = break_expert(tiny_checkpoint("mixtral"), tmp_path / "broken", layer=1, expert=4)
    outcomes = run(folder, policy(), requests())
    messages = {outcome.error.message for outcome in outcomes if outcome.error}
    assert any(message.endswith("first seen in layer 1, expert 4") for message in messages)


def test_after_many_broken_rows_the_run_is_given_up(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    for expert in range(6):
        source = folder if expert else tiny_checkpoint("mixtral")
        break_expert(source, folder, layer=2, expert=expert)
    with pytest.raises(CheckpointError, match=r"logits of 101 rows .* layer 2, expert"):
        run(folder, policy(), requests([3] * 150))


def break_expert(source: Path, folder: Path, *, layer: int, expert: int) -> Path:
    """A copy of the model in which one matrix of an expert holds infinity."""
    if source != folder:
        shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"][0] = torch.inf
    save_file(tensors, path)
    return folder


def test_no_requests_no_outcomes(tiny_checkpoint: Callable[..., Path]) -> None:
    assert run(tiny_checkpoint("mixtral"), policy(), []) == []
