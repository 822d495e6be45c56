"""Prompts that are encoded whole, and answers that attend to them: wherever everything lives,
tokens are those of transformers, which takes one sequence at a time without padding.

Experts have room for so few tokens of a prompt that long ones lose many; the prompts of a pass do
not take it from each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.errors import ConfigError, OutOfMemory
from moebatch.model.decoder import Decoder
from moebatch.plan.runnable import not_runnable
from moebatch.schedule.registry import SCHEDULES
from moebatch.spec.model.cache_layout import SinkWindow
from moebatch.spec.policy.policy import Placement, Policy, pages_of
from moebatch.spec.request import Request
from tests.engine.passes import begun
from tests.engine.test_engine import policy, requests, tokens_of
from tests.engine.test_memory import MAX_TOKENS, assert_cache_is_as_priced, problem_of
from tests.engine.test_schedules import (
    EMULATED,
    IN_MEMORY,
    built_for,
    emulated,
    gpu_policy,
    run,
)
from tests.tiny import quiet

FAMILY, START, NEW_TOKENS = "switch_transformers", 3, 6
MODELS: dict[str, dict[str, Any]] = {
    "usual": {},
    "all sparse, biased gates": {
        "num_sparse_encoder_layers": 5,
        "num_sparse_decoder_layers": 3,
        "router_bias": True,
        "expert_capacity": 2,
        "dense_act_fn": "gelu_new",
    },
}
WHOLE = {"tokens_per_pass": 120}
WHERE = {
    "streamed": replace(IN_MEMORY["usual"], **WHOLE),
    "resident": replace(IN_MEMORY["everything resident"], **WHOLE),
    "one slot, batches of one": replace(IN_MEMORY["one slot, batches of one"], **WHOLE),
    "all at once": IN_MEMORY["all at once, many slots"],
    "on disk": replace(policy(num_slots=9, **WHOLE), kv_cache=Placement(disk=1.0)),
    "sent back": policy(num_kv_pages=pages_of(103) + 1, num_slots=9, **WHOLE),
    "on a GPU, cache below": replace(EMULATED["GPU attention, cache in main memory"], **WHOLE),
    "three levels": replace(EMULATED["three levels"], **WHOLE),
    "all on a GPU": replace(EMULATED["everything on the GPU"], **WHOLE),
}


def encoded(row: Request) -> Request:
    return replace(
        row, prompt_tokens=(*row.prompt_tokens, START), num_encoded=len(row.prompt_tokens)
    )


ROWS = [encoded(row) for row in requests((1, 17, 40, 3, 96, 33, 2), max_tokens=NEW_TOKENS)]


def answers(folder: Path, rows: Sequence[Request]) -> list[tuple[int, ...]]:
    """Those of transformers."""
    from transformers import AutoModelForSeq2SeqLM

    with quiet():
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
    found = []
    for row in rows:
        prompt, count = torch.tensor([row.prompt_tokens[:-1]]), row.sampling.max_tokens
        with torch.inference_mode(), quiet():
            output = model.generate(
                prompt, max_new_tokens=count, do_sample=False, eos_token_id=None
            )
        found.append(tuple(output[0, 1:].tolist()))
    return found


@pytest.fixture(scope="module")
def known(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = {}

    def tokens(model: str) -> list[tuple[int, ...]]:
        if model not in found:
            found[model] = answers(tiny_checkpoint(FAMILY, **MODELS[model]), ROWS)
        return found[model]

    return tokens


@pytest.mark.few(name=("klotski", "multi", "simple", "pregated", "flexgen"))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("title", WHERE)
@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"cgopipe", "fastdecode", "flexgen_c"}))
def test_every_schedule_equals_transformers(
    tiny_checkpoint: Callable[..., Path],
    known: Callable[[str], list[tuple[int, ...]]],
    tmp_path: Path,
    name: str,
    title: str,
    model: str,
) -> None:
    chosen = replace(WHERE[title], schedule=name)
    folder = tiny_checkpoint(FAMILY, **MODELS[model])
    outcomes, built = run(folder, chosen, ROWS, scratch=tmp_path)
    assert tokens_of(outcomes) == known(model)
    assert built.engine.statistics.shared_tokens == 0


def test_the_plain_driver_equals_transformers(
    tiny_checkpoint: Callable[..., Path], known: Callable[[str], list[tuple[int, ...]]]
) -> None:
    outcomes, _ = run(tiny_checkpoint(FAMILY), WHERE["streamed"], ROWS, is_plain=True)
    assert tokens_of(outcomes) == known("usual")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["klotski", "hot"])
def test_hundreds_of_rows_equal_transformers(
    tiny_checkpoint: Callable[..., Path], name: str
) -> None:
    lengths = [1 + (7 * i) % 45 for i in range(200)]
    rows = [encoded(row) for row in requests(lengths, max_tokens=4)]
    many = {"batch_size": 70, "micro_batch_size": 30, "tokens_per_pass": 300, "num_kv_pages": 90}
    chosen = replace(policy(resident=0.4, num_slots=5, **many), schedule=name)
    outcomes, built = run(tiny_checkpoint(FAMILY), chosen, rows)
    assert tokens_of(outcomes) == answers(tiny_checkpoint(FAMILY), rows)
    assert built.engine.statistics.num_preempted == 0


def test_some_tokens_find_no_room(tiny_checkpoint: Callable[..., Path]) -> None:
    """Otherwise nothing here would be shown of capacities."""
    folder = tiny_checkpoint(FAMILY)
    unlimited = tiny_checkpoint(FAMILY, expert_capacity=1000)
    assert answers(folder, ROWS[4:5]) != answers(unlimited, ROWS[4:5])


def test_what_an_earlier_run_has_left_is_gone_on_with(
    tiny_checkpoint: Callable[..., Path], known: Callable[[str], list[tuple[int, ...]]]
) -> None:
    rows = begun(ROWS, known("usual"))
    outcomes, _ = run(tiny_checkpoint(FAMILY), WHERE["streamed"], rows)
    assert tokens_of(outcomes) == known("usual")


def test_rows_are_sent_back_where_pages_run_short(tiny_checkpoint: Callable[..., Path]) -> None:
    """Answers end early at first, so that more are taken in than can stay."""
    short = requests([4] * 40, max_tokens=60, stop_token_ids=frozenset(range(320)))
    long = [replace(row, index=40 + row.index) for row in requests([17] * 8, max_tokens=60)]
    rows = [encoded(row) for row in (*short, *long)]
    chosen = policy(num_kv_pages=13, num_slots=9, **WHOLE)
    outcomes, built = run(tiny_checkpoint(FAMILY), chosen, rows)
    assert tokens_of(outcomes)[40:] == answers(tiny_checkpoint(FAMILY), rows[40:])
    assert built.engine.statistics.num_preempted > 0


def test_the_system_may_not_refuse_memory(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass cannot be made smaller than a prompt."""

    def refusing(*arguments: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes")

    monkeypatch.setattr(Decoder, "attend", refusing)
    with pytest.raises(OutOfMemory):
        run(tiny_checkpoint(FAMILY), WHERE["streamed"], ROWS)


@pytest.mark.parametrize("title", ["streamed", "on disk", "three levels"])
def test_the_cache_takes_what_was_priced(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, title: str
) -> None:
    folder, chosen = tiny_checkpoint(FAMILY), WHERE[title]
    built = built_for(folder, chosen, max_tokens=MAX_TOKENS, scratch=tmp_path)
    built.close()
    assert_cache_is_as_priced(built, folder, chosen)
    if title == "streamed":
        assert built.cache.bytes_on("dram") == chosen.num_kv_pages * 16 * (3 * 2 * 4 * 7 * 4)


@pytest.mark.parametrize(
    ("chosen", "faults"),
    [
        (gpu_policy(attention_on_gpu=False, **WHOLE), ["attention_on_gpu"]),
        (gpu_policy(tokens_per_pass=64), ["tokens_per_pass"]),
        (gpu_policy(tokens_per_pass=600), []),
    ],
)
def test_what_cannot_be_run_is_said_before(
    tiny_checkpoint: Callable[..., Path], chosen: Policy, faults: list[str]
) -> None:
    hardware = emulated().hardware
    assert hardware is not None
    problem = problem_of(open_model(tiny_checkpoint(FAMILY), "float32"), hardware)
    problem = replace(problem, workload=problem.shape.cached(problem.workload))
    assert [key for key, _ in not_runnable(problem, chosen)] == faults


def test_sinks_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    shape = open_model(tiny_checkpoint(FAMILY), "float32").shape
    with pytest.raises(ConfigError, match="encodes prompts whole"):
        shape.seen_through(SinkWindow(4, 64))
