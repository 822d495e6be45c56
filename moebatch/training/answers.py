"""What a model itself says to prompts: the text that it surely should expect."""

from collections.abc import Sequence
from itertools import groupby

from moebatch.training.reading import Reading, reading_batches
from moebatch.training.whole_model import WholeModel

ANSWER_TOKENS = 64
"""Most tokens of an answer that is given to a prompt."""


def answered(model: WholeModel, prompts: Sequence[Reading], max_positions: int) -> list[Reading]:
    """Prompts with what the model says to them, greedily, the longest first."""
    found = []
    for length, alike in groupby(sorted(prompts, key=len, reverse=True), key=len):
        max_tokens = min(ANSWER_TOKENS, max_positions - length)
        for batch in reading_batches(list(alike)):
            said = model.answers(batch.tokens_BS, max_tokens)
            for prompt, answer in zip(batch.tokens_BS.tolist(), said, strict=True):
                found.append(Reading((*prompt, *answer), length))
    return found
