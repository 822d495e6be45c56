"""What transformers makes of the usual requests."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences of tens of tokens go round."""
    from moebatch.engine.passes import layout
    from moebatch.spec.model import cache_layout
    from tests.engine.passes import SLICE

    monkeypatch.setattr(cache_layout, "LARGEST_SLICE", SLICE)
    monkeypatch.setattr(layout, "PROMPT_ROWS", SLICE)


@pytest.fixture(scope="session")
def expected(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], list[tuple[int, ...]]]:
    """Greedy tokens of the usual requests by family, each worked out once."""
    from tests.engine.test_engine import NEW_TOKENS, requests
    from tests.model.oracle import greedy_answers, load

    known: dict[str, list[tuple[int, ...]]] = {}

    def tokens(family: str) -> list[tuple[int, ...]]:
        if family not in known:
            model = load(tiny_checkpoint(family))
            known[family] = greedy_answers(model, requests(), NEW_TOKENS)
        return known[family]

    return tokens
