"""Predictors learn what can be learnt from a trace, and come back from their files as they were."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moebatch.errors import CheckpointError
from moebatch.predict.guesser import LearnedGuesser, Perceptron, top_shares
from moebatch.predict.learn import (
    Effort,
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
    save_first_gate,
    save_learned,
    save_tokens,
)
from moebatch.predict.owner import ModelOwner
from moebatch.predict.seen import Seen

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


def test_what_a_later_layer_chooses_is_learnt_from_what_an_earlier_one_sees() -> None:
    seen, _ = seen_by()
    hidden, chosen = seen.hidden_LND[0], seen.experts_LNK[2]
    perceptron = learn_perceptron(
        hidden[:800], chosen[:800], num_experts=EXPERTS, effort=Effort(num_epochs=60)
    )
    unseen = torch.from_numpy(hidden[800:].astype(np.float32))
    found = precision(top_shares(perceptron.logits(unseen), CHOSEN), chosen[800:])
    by_chance = CHOSEN / EXPERTS
    assert found > 0.8 > by_chance


def test_the_first_gate_of_the_next_token_is_learnt_across_the_right_step() -> None:
    seen, gates = seen_by()
    gate = learn_first_gate(seen, gates[0], effort=Effort(num_epochs=120))
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


def learned() -> LearnedGuesser:
    torch.manual_seed(0)
    perceptron = Perceptron(
        torch.randn(5, HIDDEN), torch.randn(5), torch.randn(EXPERTS, 5), torch.randn(EXPERTS)
    )
    return LearnedGuesser({0: perceptron}, CHOSEN, 2)


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_learned(path, learned(), OWNER)
    again = load_learned(path, OWNER, hidden_size=HIDDEN)
    for one, other in zip(learned().by_position[0], again.by_position[0], strict=True):
        assert torch.allclose(one, other, atol=1e-3)
    gate = torch.randn(EXPERTS, HIDDEN)
    save_first_gate(path, gate, OWNER)
    assert torch.allclose(load_first_gate(path, OWNER, hidden_size=HIDDEN), gate, atol=1e-2)
    shares = np.full((len(LAYERS), VOCAB, EXPERTS), 0.25, np.float16)
    save_tokens(path, shares, OWNER)
    assert np.array_equal(load_tokens(path, OWNER, vocab_size=VOCAB).shares_LVE, shares)


def test_files_of_another_model_or_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_learned(path, learned(), OWNER)
    with pytest.raises(CheckpointError, match="is no first gate; run `moebatch calibrate"):
        load_first_gate(path, OWNER, hidden_size=HIDDEN)
    with pytest.raises(CheckpointError, match="layer 0 is damaged"):
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
