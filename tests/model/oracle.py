"""What transformers answers: one sequence at a time, with its own cache."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from moebatch.spec.request import Request

PROMPT_LENGTHS = (1, 5, 17, 40, 96)


def prompts(vocab_size: int = 320, lengths: Sequence[int] = PROMPT_LENGTHS) -> list[list[int]]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def greedy(
    model: Any, prompt: Sequence[int], num_new: int, *, cache: Any = None
) -> tuple[list[int], torch.Tensor]:
    """The next `num_new` tokens and the logits [num_new, V] from which they come. Positions are
    given, since MiniMax counts them in its first layer, which may cache nothing that it counts."""
    tokens, logits = [], []
    step, positions = torch.tensor([prompt]), torch.arange(len(prompt))[None]
    with _rotations_of_this_sequence(model), torch.inference_mode():
        for _ in range(num_new):
            output = model(step, past_key_values=cache, use_cache=True, position_ids=positions)
            cache, positions = output.past_key_values, positions[:, -1:] + 1
            logits.append(output.logits[0, -1].float())
            tokens.append(int(logits[-1].argmax()))
            step = torch.tensor([tokens[-1:]])
    return tokens, torch.stack(logits)


def greedy_answers(model: Any, rows: Sequence[Request], num_new: int) -> list[tuple[int, ...]]:
    """The next `num_new` tokens of each row."""
    return [tuple(greedy(model, row.prompt_tokens, num_new)[0]) for row in rows]


@contextmanager
def _rotations_of_this_sequence(model: Any) -> Iterator[None]:
    """Scalings that depend on lengths keep state in the model, which the next sequence must not
    see. They put other tensors into the places of those that are there, and change none."""
    kept = [
        (module, dict(vars(module)), dict(module._buffers))
        for module in model.modules()
        if "Rotary" in type(module).__name__
    ]
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers = buffers


def rounding_cache(rounded: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A cache of transformers' in which keys and values are `rounded` on their way in; they come as
    [sequences, heads, positions, head size]. All that attention sees comes out of it."""
    from transformers import DynamicCache

    class Rounding(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)

    return Rounding()


def load(folder: Any, dtype: str = "float32") -> Any:
    """The model as transformers reads it from the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from tests.tiny import quiet

    with quiet():
        sees = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
        auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        return auto.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",  # others do not know all widths
        ).eval()
