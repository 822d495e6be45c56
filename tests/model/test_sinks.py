"""Sinks and a window: however prompts are cut, by the kernels and without them, tokens and logits
are those of a reference that counts positions within what a token sees."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moebatch.errors import ConfigError
from moebatch.spec.model.cache_layout import SinkWindow
from tests.model.driver import Driver
from tests.model.oracle import load, prompts
from tests.model.sinks import greedy_with_sinks, seen
from tests.model.test_cached_numbers import arithmetic
from tests.model.ways import ApartDriver
from tests.tiny import GROUPED

NEW_TOKENS = 4
LENGTHS = (1, 5, 17, 40, 96)
WINDOWS = [SinkWindow(4, 12), SinkWindow(1, 1), SinkWindow(20, 3), SinkWindow(0, 9)]
__all__ = ["arithmetic"]


@pytest.mark.few
@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("sink_window", WINDOWS, ids=str)
@pytest.mark.parametrize("family", GROUPED)
def test_tokens_and_logits_are_those_of_the_reference(
    tiny_checkpoint: Callable[..., Path], family: str, sink_window: SinkWindow
) -> None:
    folder, texts = tiny_checkpoint(family), prompts(lengths=LENGTHS)
    model = load(folder)
    expected = [greedy_with_sinks(model, text, NEW_TOKENS, sink_window) for text in texts]
    cuts = (
        {},
        {"slice_tokens": 7, "micro_batch": 2},
        {"span_tokens": 11, "stagger": 1},
        {"slice_tokens": 3, "shuffled": False},
    )
    for make, cut in zip((Driver, Driver, ApartDriver, Driver), cuts, strict=True):
        seqs = make(folder, sink_window=sink_window).generate(texts, NEW_TOKENS, **cut)
        for seq, (tokens, logits) in zip(seqs, expected, strict=True):
            assert seq.answer == tokens, cut
            torch.testing.assert_close(torch.stack(seq.logits), logits, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("arithmetic")
def test_a_window_of_the_model_that_is_shorter_stays(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("mixtral", sliding_window=8)
    texts = prompts(lengths=LENGTHS)
    own, asked = (
        [seq.answer for seq in Driver(folder, sink_window=wide).generate(texts, NEW_TOKENS)]
        for wide in (None, SinkWindow(4, 9))
    )
    assert own == asked


def test_a_turned_query_scores_sinks_as_one_that_is_nearer() -> None:
    """Rotary scores depend on distances only: what is cached need not be rotated anew."""
    sink_window = SinkWindow(4, 12)
    for position in (0, 3, 15, 16, 17, 500):
        visible = seen(position, sink_window)
        query = min(position, sink_window.num_seen - 1)
        assert len(visible) == query + 1
        for place, at in enumerate(visible):
            turned = query - at if at < sink_window.sinks else position - at
            assert turned == query - place, "the distance within what is seen"
    assert sink_window.most_cached == 4 + 12 + 511


@pytest.mark.parametrize(
    ("family", "does"), [("hunyuan_v1_moe", "norms queries"), ("mistral3", "multiplies queries")]
)
def test_queries_that_would_have_to_be_made_anew_cannot_be_turned(
    tiny_checkpoint: Callable[..., Path], family: str, does: str
) -> None:
    folder = tiny_checkpoint(family)
    with pytest.raises(ConfigError, match=rf"model\.attention: \w+ {does}"):
        Driver(folder, sink_window=WINDOWS[0])
