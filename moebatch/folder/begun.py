"""Answers that were cut off, as a line of a journal and back."""

import json
from collections.abc import Sequence
from typing import Any

from moebatch.spec.request import Begun, TokenLogprob


def begun_line(choices: Sequence[Begun]) -> bytes:
    """What there is of each choice. Numbers come back as they were, to the last bit."""
    content = [
        {
            "tokens": choice.tokens,
            "logprobs": [
                [each.token, each.logprob, list(each.top.items())] for each in choice.logprobs
            ],
        }
        for choice in choices
    ]
    return json.dumps(content, separators=(",", ":")).encode()


def begun_from(line: bytes, *, num_choices: int) -> tuple[Begun, ...]:
    """The choices of a line; nothing if they are not those of a request with so many, or none."""
    try:
        choices = tuple(_choice(choice) for choice in json.loads(line))
    except (ValueError, TypeError, LookupError, RecursionError):
        return ()
    return choices if len(choices) == num_choices else ()


def _choice(content: dict[str, Any]) -> Begun:
    return Begun(
        tokens=tuple(content["tokens"]),
        logprobs=tuple(
            TokenLogprob(token=token, logprob=logprob, top={int(k): v for k, v in top})
            for token, logprob, top in content["logprobs"]
        ),
    )
