"""What transformers makes of the usual requests."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def expected(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], list[tuple[int, ...]]]:
    """Greedy tokens of the usual requests by family, each worked out once."""
    from tests.engine.test_engine import NEW_TOKENS, requests
    from tests.model.oracle import greedy, load

    known: dict[str, list[tuple[int, ...]]] = {}

    def tokens(family: str) -> list[tuple[int, ...]]:
        if family not in known:
            model = load(tiny_checkpoint(family))
            known[family] = [
                tuple(greedy(model, row.prompt_tokens, NEW_TOKENS)[0]) for row in requests()
            ]
        return known[family]

    return tokens
