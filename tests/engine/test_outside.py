"""A made-up family in a made-up format comes from disk, in chunks and in pages, like any other."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from moebatch.spec.policy.policy import Placement, Policy
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from tests.engine.test_engine import policy, tokens_of
from tests.engine.test_schedules import gpu_policy, run
from tests.model.test_outside import (
    PROMPTS,
    V,
    reference,
    registered,
    row_scaled,
    stacked,
    tensors,
    whole,
    written,
)

__all__ = ["registered", "tensors"]
NEW_TOKENS = 4
POLICIES = {
    "klotski in main memory": policy(num_slots=2, resident=0),
    "klotski on an emulated GPU, from disk": gpu_policy(
        vram=0.3, disk=0.4, kv=Placement(vram=1.0), num_slots=3
    ),
    "cgopipe on an emulated GPU, in pages": replace(
        gpu_policy(vram=0.2, disk=0.3), schedule="cgopipe"
    ),
}


@pytest.mark.parametrize("title", POLICIES)
def test_it_answers_as_its_formulas_say(
    tensors: Mapping[str, Tensor], tmp_path: Path, title: str
) -> None:
    chosen: Policy = POLICIES[title]
    expected = whole(row_scaled(tensors))
    folder = written(tmp_path, row_scaled(stacked(tensors)))
    greedy = Sampling(temperature=0.0, max_tokens=NEW_TOKENS)
    rows = [
        Request(index=i, custom_id=f"{i}", prompt_tokens=tuple(prompt), sampling=greedy)
        for i, prompt in enumerate(PROMPTS)
    ]
    outcomes, _ = run(folder, chosen, rows)
    for prompt, tokens in zip(PROMPTS, tokens_of(outcomes), strict=True):
        logits_TV = reference(expected, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert logits_TV.shape == (NEW_TOKENS, V)
        assert list(tokens) == logits_TV.argmax(-1).tolist()
