"""Which experts of the built-in model the kinds of tasks use.

Shape letters: `T` tokens, `L` layers, `Q` kinds of tasks, `E` experts.
"""

from random import Random
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers import Qwen3MoeForCausalLM as Model

from demo.tasks import KINDS, draw_task
from demo.tokenizer import END, chat_frame

_TASKS_PER_KIND: Final = 100


def expert_shares(model: Model, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Share of the chosen experts by layer, kind and expert, `share_LQE`; each row sums to 1.

    Taken over prompts and right answers of held-out tasks. A token chooses several experts, so
    a row would be even at 1/E and no entry can pass 1 / experts per token.
    """
    before, after = chat_frame(tokenizer)
    rng = Random(0)
    by_kind = []
    for kind in KINDS:
        tasks = [draw_task(rng, kind, held_out=True) for _ in range(_TASKS_PER_KIND)]
        texts = [before + task.prompt + after + task.answer + END for task in tasks]
        by_kind.append(_shares(model, tokenizer, texts))
    return torch.stack(by_kind, dim=1)


def _shares(model: Model, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    encoded = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    real = encoded["attention_mask"].flatten().bool()
    with torch.no_grad():
        outputs = model.model(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            use_cache=False,
            output_router_logits=True,
        )
    shares = []
    for logits_TE in outputs.router_logits:
        chosen = logits_TE[real].topk(model.config.num_experts_per_tok, dim=-1).indices.flatten()
        shares.append(torch.bincount(chosen, minlength=logits_TE.shape[-1]) / len(chosen))
    return torch.stack(shares)


def gini(share_E: Tensor) -> float:
    """Gini coefficient of loads: 0 when all experts carry the same, towards 1 when one has all."""
    ordered = share_E.double().sort().values
    ranks = torch.arange(1, len(ordered) + 1, dtype=torch.float64)
    return float((2 * ranks - len(ordered) - 1) @ ordered / (len(ordered) * ordered.sum()))


def distance_between_kinds(share_LQE: Tensor) -> list[float]:
    """By layer: the part of its load, 0..1, by which a kind differs from the mean of all kinds
    (total variation), averaged over the kinds. 0 says that routing ignores the task."""
    mean_LE = share_LQE.mean(1, keepdim=True)
    return ((share_LQE - mean_LE).abs().sum(-1) / 2).mean(-1).tolist()


def routing_report(share_LQE: Tensor) -> str:
    """A Markdown table per layer: percent of the load by kind and expert, and the Gini."""
    lines = []
    num_experts = share_LQE.shape[-1]
    for layer, distance in enumerate(distance_between_kinds(share_LQE)):
        share_QE = share_LQE[layer]
        heads = " | ".join(str(expert) for expert in range(num_experts))
        lines += [
            f"Layer {layer} (a kind differs from the mean of all in {distance:.0%} of its load):",
            "",
            f"| task | {heads} | Gini |",
            "| --- |" + " ---: |" * (num_experts + 1),
        ]
        for name, share_E in [*zip(KINDS, share_QE, strict=True), ("all", share_QE.mean(0))]:
            cells = " | ".join(f"{100 * share:.0f}" for share in share_E.tolist())
            lines.append(f"| {name} | {cells} | {gini(share_E):.2f} |")
        lines.append("")
    return "\n".join(lines)
