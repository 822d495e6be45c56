"""Rows of a demo job, as lines of an OpenAI batch file."""

import json
from collections.abc import Iterator
from typing import Final

from demo.tasks import demo_tasks

MODEL_NAME: Final = "moebatch-demo"
MAX_ANSWER_TOKENS: Final = 48


def demo_rows(seed: int, count: int) -> Iterator[str]:
    """JSON lines that ask held-out tasks; the answers are not in them."""
    for number, task in enumerate(demo_tasks(seed, count), start=1):
        row = {
            "custom_id": f"demo-{number:03d}-{task.kind}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": MODEL_NAME,
                "messages": [{"role": "user", "content": task.prompt}],
                "max_tokens": MAX_ANSWER_TOKENS,
                "temperature": 0,
            },
        }
        yield json.dumps(row)
