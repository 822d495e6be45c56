"""Predictors learn what can be learnt from a trace, and come back from their files as they were."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from moebatch.checkpoint.fingerprint import ModelOwner
from moebatch.errors import CheckpointError
from moebatch.predict.guesser import LearnedGuesser, Perceptron, beginning_of, linear_of, top_shares
from moebatch.predict.learn import (
    Effort,
    Examples,
    Seen,
    examples_ahead,
    examples_of_beginning,
    learn_first_gate,
    learn_perceptron,
    precision,
    token_shares,
)
from moebatch.predict.learnt_files import (
    FIRST_GATE,
    LEARNED,
    TOKENS,
    load_first_gate,
    load_learned,
    load_tokens,
    save_learned,
)

LAYERS, EXPERTS, CHOSEN, HIDDEN, VOCAB = (0, 1, 2), 6, 2, 16, 10
OWNER = ModelOwner(
    folder=Path("/models/m"),
    fingerprint="abc",
    moe_layers=LAYERS,
    num_experts=EXPERTS,
    experts_per_token=CHOSEN,
)


def top(logits: torch.Tensor) -> np.ndarray:
    return logits.topk(CHOSEN, dim=-1).indices.numpy().astype(np.uint16)


def seen_by(passes: int = 8, rows: int = 128) -> tuple[Seen, torch.Tensor]:
    """Tokens whose later choices are a function of what the first gate sees; the token of a row
    decides over what the first gate sees of the row after it."""
    random = torch.Generator().manual_seed(0)
    gates = torch.randn(len(LAYERS), EXPERTS, HIDDEN, generator=random)
    step = torch.randn(HIDDEN, HIDDEN, generator=random) / HIDDEN**0.5
    hidden, chosen, tokens = [], [], []
    for _ in range(passes):
        last = torch.randn(rows, HIDDEN, generator=random)
        first = torch.cat([torch.randn(1, HIDDEN, generator=random), last[:-1] @ step])
        middle = first.roll(1, dims=1)
        tokens.append(first[:, 0].gt(0).numpy().astype(np.int64))
        hidden.append(torch.stack([first, middle, last]).to(torch.float16).numpy())
        logits = (first @ gates[0].T, middle @ gates[1].T, first @ gates[2].T)
        chosen.append(np.stack([top(of_layer) for of_layer in logits]))
    seen = Seen(
        hidden_LND=np.concatenate(hidden, axis=1),
        experts_LNK=np.concatenate(chosen, axis=1),
        tokens_N=np.concatenate(tokens),
        is_first_N=np.arange(passes * rows) % rows == 0,
    )
    return seen, gates


def right(examples: Examples, epochs: int) -> float:
    """How right one is who has learnt from the first part, about the rest."""
    places = examples.places_N
    known = replace(examples, places_N=places[:800])
    perceptron = learn_perceptron(known, num_experts=EXPERTS, effort=Effort(num_epochs=epochs))
    unseen = places[800:]
    shares = top_shares(perceptron.logits(examples.input_of(unseen)), CHOSEN)
    return precision(shares, examples.chosen_of(unseen))


BY_CHANCE = CHOSEN / EXPERTS


def test_what_a_later_layer_chooses_is_learnt_from_what_an_earlier_one_sees() -> None:
    seen, _ = seen_by()
    assert right(examples_ahead(seen, 0, stride=2), 40) > 0.8 > BY_CHANCE


def test_what_the_next_token_chooses_is_learnt_from_what_the_last_layer_sees() -> None:
    seen, _ = seen_by()
    examples = examples_ahead(seen, 2, stride=1)
    assert not seen.is_first_N[examples.places_N + 1].any()
    assert right(examples, 40) > 0.8


def test_what_a_token_chooses_is_learnt_from_what_it_is_and_what_was_seen_before_it() -> None:
    seen, _ = seen_by()
    of_tokens = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    examples = examples_of_beginning(seen, 0, lambda tokens: of_tokens[torch.from_numpy(tokens)])
    input_BD = examples.input_of(examples.places_N)
    embedded = of_tokens[torch.from_numpy(seen.tokens_N[examples.places_N + 1])]
    before = torch.from_numpy(seen.hidden_LND[2][examples.places_N].astype(np.float32))
    known = input_BD[:, HIDDEN:].any(dim=1)
    assert 0.4 < known.float().mean() < 0.6
    assert torch.equal(input_BD[known], beginning_of(embedded, before)[known])
    assert torch.equal(input_BD[~known], beginning_of(embedded, None)[~known])
    assert right(examples, 60) > BY_CHANCE + 0.2


def test_the_first_gate_of_the_next_token_is_learnt_across_the_right_step() -> None:
    seen, gates = seen_by()
    gate = learn_first_gate(
        seen,
        partial(linear_of, gate_ED=gates[0]),
        num_experts=EXPERTS,
        effort=Effort(num_epochs=120),
    )
    followed = seen.followed_N
    last = torch.from_numpy(seen.hidden_LND[2][followed].astype(np.float32))
    chosen = seen.experts_LNK[0][followed + 1]
    assert precision(top_shares(last @ gate.T, CHOSEN), chosen) > 0.7


def test_tokens_keep_what_they_chose_and_unseen_ones_go_by_all() -> None:
    seen, _ = seen_by()
    shares = token_shares(seen, num_experts=EXPERTS, vocab_size=VOCAB)
    assert shares.shape == (len(LAYERS), VOCAB, EXPERTS)
    assert shares.astype(np.float64).sum(axis=2) == pytest.approx(
        np.full((len(LAYERS), VOCAB), CHOSEN), rel=0.01
    )
    usual = np.bincount(seen.experts_LNK[0].ravel(), minlength=EXPERTS) / len(seen)
    assert shares[0, 9] == pytest.approx(usual, rel=0.01)
    assert not np.allclose(shares[0, 0], shares[0, 1], atol=0.02)


def test_a_token_that_was_seen_once_goes_half_by_what_all_tokens_choose() -> None:
    seen = Seen(
        hidden_LND=np.zeros((1, 3, 2), np.float16),
        experts_LNK=np.array([[[0], [1], [1]]], np.uint16),
        tokens_N=np.array([4, 5, 5]),
        is_first_N=np.array([True, False, False]),
    )
    (shares_VE,) = token_shares(seen, num_experts=2, vocab_size=6)
    assert shares_VE[4] == pytest.approx([(1 + 1 / 3) / 2, (2 / 3) / 2], rel=1e-3)
    assert shares_VE[5] == pytest.approx([(1 / 3) / 3, (2 + 2 / 3) / 3], rel=1e-3)


def test_no_more_steps_are_made_than_are_allowed() -> None:
    seen, _ = seen_by(passes=8)
    shares: list[float] = []
    effort = Effort(num_epochs=9, most_steps=5)
    examples = examples_ahead(seen, 0, stride=1)
    learn_perceptron(examples, num_experts=EXPERTS, effort=effort, advance=shares.append)
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def learned() -> LearnedGuesser:
    torch.manual_seed(0)

    def perceptron(input_size: int) -> Perceptron:
        return Perceptron(
            torch.randn(5, input_size),
            torch.randn(5),
            torch.randn(EXPERTS, 5),
            torch.randn(EXPERTS),
        )

    ahead, beginning = ([perceptron(size * HIDDEN) for _ in range(4 - size)] for size in (1, 2))
    return LearnedGuesser(ahead, beginning, CHOSEN)


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "file"
    written = learned()
    save_learned(path, written, OWNER)
    again = load_learned(path, OWNER, hidden_size=HIDDEN)
    assert (again.stride, again.num_chosen) == (2, CHOSEN)
    perceptrons = [*written.ahead, *written.beginning], [*again.ahead, *again.beginning]
    for one, other in zip(*perceptrons, strict=True):
        for theirs, ours in zip(one, other, strict=True):
            assert torch.allclose(theirs, ours, atol=1e-2)
    gate = torch.randn(EXPERTS, HIDDEN)
    FIRST_GATE.save(path, OWNER, {"gate": gate.to(torch.float16).numpy()})
    assert torch.allclose(load_first_gate(path, OWNER, hidden_size=HIDDEN), gate, atol=1e-2)
    shares = np.full((len(LAYERS), VOCAB, EXPERTS), 0.25, np.float16)
    TOKENS.save(path, OWNER, {"shares": shares})
    assert np.array_equal(load_tokens(path, OWNER, vocab_size=VOCAB).shares_LVE, shares)


def test_files_of_another_model_or_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_learned(path, learned(), OWNER)
    with pytest.raises(CheckpointError, match="is no first gate; run `moebatch calibrate"):
        load_first_gate(path, OWNER, hidden_size=HIDDEN)
    with pytest.raises(
        CheckpointError, match=r"array 'ahead\.0\.into_WD' is float16 \[5, \d+\], must be"
    ):
        load_learned(path, OWNER, hidden_size=HIDDEN + 1)
    other = ModelOwner(
        folder=OWNER.folder,
        fingerprint="abd",
        moe_layers=LAYERS,
        num_experts=EXPERTS,
        experts_per_token=CHOSEN,
    )
    with pytest.raises(CheckpointError, match="another state"):
        load_learned(path, other, hidden_size=HIDDEN)
    assert len({kind.path(Path("/m")) for kind in (TOKENS, LEARNED, FIRST_GATE)}) == 3
