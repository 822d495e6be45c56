"""Trains the built-in model: `python -m demo.train --out DIR [--minutes N] [--seed 0]`.

Shape letters: `B` rows, `S` positions, `T` tokens with an answer to give, `E` experts, `Q`
kinds of tasks, `V` vocabulary.
"""

import argparse
import time
from copy import deepcopy
from itertools import count
from pathlib import Path
from random import Random
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig
from transformers import Qwen3MoeForCausalLM as Model

from demo.batches import IGNORED, Batch, TaskMix, pack, samples
from demo.evaluate import report
from demo.tasks import KINDS, draw_task
from demo.tokenizer import MAX_TOKENS, VOCAB_SIZE, train_tokenizer

_ROWS: Final = 32
_ROW_TOKENS: Final = 128
_WARMUP_STEPS: Final = 100
_BALANCE: Final = 0.005
"""Weight of the load-balancing loss: enough that no expert dies, too little to even them out."""
_SPECIALISE: Final = 0.02
"""Weight of the loss for routing that says less about the task than `_INFORMATION_NATS`."""
_INFORMATION_NATS: Final = 0.8
_SAVE_EVERY_S: Final = 240.0
_REPORT_EVERY_STEPS: Final = 250
_TOKENIZER_TEXTS_PER_KIND: Final = 1500


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Trains the tokenizer on training tasks, all kinds alike."""
    rng = Random(seed)
    tasks = (
        draw_task(rng, kind, held_out=False)
        for kind in KINDS
        for _ in range(_TOKENIZER_TEXTS_PER_KIND)
    )
    return train_tokenizer(text for task in tasks for text in (task.prompt, task.answer))


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Model:
    """An untrained model: 4 layers of 16 experts, 2 of them per token, 2.6M parameters."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=96,
        intermediate_size=96,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        router_aux_loss_coef=_BALANCE,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Model(config)
    model.set_experts_implementation("grouped_mm")
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def balance_loss(scores_TE: Tensor, top_k: int) -> Tensor:
    """E * sum(share of choices * mean score) of one layer, 1 when all experts are used alike.

    Switch Transformer, equation 4. Taken layer by layer, since an expert that is dead in one
    layer must not be outweighed by its namesake of another.
    """
    num_experts = scores_TE.shape[-1]
    chosen = scores_TE.topk(top_k, dim=-1).indices.flatten()
    share_E = torch.bincount(chosen, minlength=num_experts) / len(chosen)
    return num_experts * (share_E * scores_TE.mean(0)).sum()


def task_information(scores_TE: Tensor, kind_T: Tensor) -> Tensor:
    """Mutual information, in nats, of the kind of task and the expert that serves its tokens,
    all kinds weighing the same: 0 when routing ignores the task."""
    member_TQ = functional.one_hot(kind_T, len(KINDS)).to(scores_TE.dtype)
    sizes_Q = member_TQ.sum(0)
    share_QE = (member_TQ.T @ scores_TE)[sizes_Q > 0] / sizes_Q[sizes_Q > 0, None]
    return (share_QE * (share_QE / share_QE.mean(0)).log()).sum(-1).mean()


def routing_loss(router_logits: tuple[Tensor, ...], batch: Batch, top_k: int) -> Tensor:
    """What is added to the loss for experts that die and for routing that ignores the task."""
    used = (batch.sample_BS >= 0).flatten()
    kind_T = batch.kinds[batch.sample_BS.flatten()[used]]
    total = torch.zeros(())
    for logits_TE in router_logits:
        scores_TE = logits_TE[used].softmax(-1)
        missing = functional.relu(_INFORMATION_NATS - task_information(scores_TE, kind_T))
        total = total + _BALANCE * balance_loss(scores_TE, top_k) + _SPECIALISE * missing
    return total / len(router_logits)


def train_step(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss of a batch, and which of its conversations were answered right (teacher-forced)."""
    outputs = model.model(
        input_ids=batch.ids_BS,
        position_ids=batch.positions_BS,
        use_cache=False,
        output_router_logits=True,
    )
    answering = batch.labels_BS != IGNORED
    logits_TV = model.lm_head(outputs.last_hidden_state[answering])
    labels_T = batch.labels_BS[answering]
    loss = functional.cross_entropy(logits_TV, labels_T)
    top_k = model.config.num_experts_per_tok
    loss = loss + routing_loss(outputs.router_logits, batch, top_k)
    wrong = batch.sample_BS[answering][logits_TV.argmax(-1) != labels_T]
    right = torch.ones(len(batch.kinds), dtype=torch.bool).index_fill(0, wrong, False)
    return loss, right


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Warm-up by steps, then linearly to nothing over the time that was granted (0..1)."""
    return peak * min(1.0, (step + 1) / _WARMUP_STEPS) * max(0.0, 1.0 - progress)


def save(model: Model, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the model rounded to bfloat16, as transformers lays it out, with its tokenizer."""
    deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written for its owner alone
    tokenizer.save_pretrained(out)


def begin_anew(seed: int) -> tuple[Model, PreTrainedTokenizerFast]:
    """An untrained model with a fresh tokenizer."""
    tokenizer = build_tokenizer(seed)
    return build_model(tokenizer, seed), tokenizer


def go_on(checkpoint: Path) -> tuple[Model, PreTrainedTokenizerFast]:
    """A saved model, in float32 and ready to be trained further."""
    model = Model.from_pretrained(
        checkpoint, dtype=torch.float32, experts_implementation="grouped_mm"
    )
    return model, PreTrainedTokenizerFast.from_pretrained(checkpoint)


def train(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    *,
    out: Path,
    minutes: float,
    peak_rate: float,
    seed: int,
) -> int:
    """Trains for so many minutes of wall time and saves to `out`; returns the steps made."""
    mix = TaskMix(rng=Random(seed + 1))
    source = samples(tokenizer, mix)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak_rate, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    begin = saved = time.monotonic()
    for step in count():
        now = time.monotonic()
        progress = (now - begin) / (60 * minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(peak_rate, step, progress)
        batch = pack(source, rows=_ROWS, row_tokens=_ROW_TOKENS, pad=tokenizer.pad_token_id)
        loss, right = train_step(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mix.learn(batch.kinds, right)
        if step % _REPORT_EVERY_STEPS == 0:
            rights = " ".join(f"{name} {share:.2f}" for name, share in mix.right.items())
            print(f"{now - begin:6.0f} s  step {step:5d}  loss {loss:.3f}  {rights}", flush=True)
        if now - saved > _SAVE_EVERY_S:
            save(model, tokenizer, out)
            saved = now
    save(model, tokenizer, out)
    return step


def main() -> None:
    """Command line of the training."""
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--minutes", type=float, default=45.0, help="wall time of the training")
    parser.add_argument("--go-on", type=Path, help="checkpoint to start from")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="threads torch may use")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = go_on(options.go_on) if options.go_on else begin_anew(options.seed)
    steps = train(
        model,
        tokenizer,
        out=options.out,
        minutes=options.minutes,
        peak_rate=options.rate,
        seed=options.seed,
    )
    print(f"{steps} steps")
    report(options.out)


if __name__ == "__main__":
    main()
