"""What transformers answers: one sequence at a time, with its own cache."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

PROMPT_LENGTHS = (1, 5, 17, 40, 96)


def prompts(vocab_size: int = 320, lengths: Sequence[int] = PROMPT_LENGTHS) -> list[list[int]]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def greedy(model: Any, prompt: Sequence[int], num_new: int) -> tuple[list[int], torch.Tensor]:
    """The next `num_new` tokens and the logits [num_new, V] from which they come."""
    # Length-dependent rotary scalings keep state in the model from one sequence to the next.
    fresh = copy.deepcopy(model)
    tokens, logits, cache = [], [], None
    step = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(num_new):
            output = fresh(step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits[0, -1].float())
            tokens.append(int(logits[-1].argmax()))
            step = torch.tensor([tokens[-1:]])
    return tokens, torch.stack(logits)


def load(folder: Any, dtype: str = "float32") -> Any:
    """The model as transformers reads it from the folder."""
    from transformers import AutoModelForCausalLM

    from tests.tiny import quiet

    with quiet():
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()
