"""What the engine does between two passes: it chooses tokens, ends and admits sequences, and works
out what the next pass attends to."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moebatch.engine.engine import Engine
from moebatch.engine.passes.broken import BrokenRows
from moebatch.engine.passes.passes import Passes, PassInput
from moebatch.engine.sampling.sampler import Sampler
from moebatch.layout.scratch import Limits
from moebatch.measure.sizes import TINY_MODEL
from moebatch.measure.synthetic import synthetic_layer
from moebatch.measure.timer import CacheSweep
from moebatch.model.decoder import Decoder
from moebatch.schedule.steps.kv_route import Place
from moebatch.spec.policy.policy import Placement, Policy, pages_of
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from moebatch.store.kv.cache import KVCache
from moebatch.store.kv.layout import KvLayout

_FEW, _MANY = 64, 1024
"""Sequences of a pass."""
_PROMPT, _ANSWER = 100, 24
"""Tokens of each."""
_SETTLED = 16
"""Passes of them that count: the last ones."""


class BetweenPasses(NamedTuple):
    """Seconds between a pass and the next."""

    pass_s: float
    """Whatever their sequences."""
    row_s: float
    """For each sequence whose next token is chosen."""


def between_passes(device: torch.device, memory: Tensor) -> BetweenPasses:
    """As the engine takes them, with a model whose layers do nothing and whose head is tiny."""
    sweep = CacheSweep(memory)
    with torch.inference_mode():
        few_s, many_s = (_usual_s(count, device, sweep) for count in (_FEW, _MANY))
    row_s = max(0.0, many_s - few_s) / (_MANY - _FEW)
    return BetweenPasses(pass_s=max(0.0, few_s - _FEW * row_s), row_s=row_s)


def _usual_s(num_sequences: int, device: torch.device, sweep: CacheSweep) -> float:
    """The lower quartile, since other programs only ever add time."""
    place: Place = "vram" if device.type == "cuda" else "dram"
    num_tokens = _PROMPT + _ANSWER
    policy = Policy(
        batch_size=num_sequences,
        micro_batch_size=num_sequences,
        weights=Placement(dram=1.0),
        tokens_per_pass=num_sequences * _PROMPT,
        num_slots=0,
        num_kv_pages=num_sequences * pages_of(num_tokens),
    )
    limits = Limits(
        pass_tokens=policy.tokens_per_pass,
        micro_batch_tokens=num_sequences,
        context_tokens=num_tokens,
    )
    decoder = synthetic_layer(TINY_MODEL, limits, torch.float32, device).decoder
    cache = KVCache(
        decoder.shape.cache_groups(num_tokens),
        num_pages=[policy.num_kv_pages],
        dtype=torch.float32,
        layout=KvLayout(levels=[place], places=[place], vram_device=device),
    )
    passes = _BarePasses(decoder, cache, policy, main=place, sweep=sweep)
    engine = Engine(
        passes=passes,
        sampler=Sampler(vocab_size=decoder.shape.vocab_size, end_tokens=frozenset(), job_seed=0),
        decoder=_NoText(),
    )
    for _ in engine.run(map(_request, range(num_sequences))):
        pass
    cache.close()
    return sorted(passes.between_s[-_SETTLED:])[_SETTLED // 4]


def _request(index: int) -> Request:
    sampling = Sampling(max_tokens=_ANSWER, temperature=0.0, ignore_eos=True)
    return Request(index=index, custom_id="", prompt_tokens=(1,) * _PROMPT, sampling=sampling)


class _NoText:
    """A tokenizer that has no text for any token."""

    def decode(self, tokens: Sequence[int], /) -> str:
        return ""


class _BarePasses(Passes):
    """Layers that note when they begin and end, and sweep caches between, as weights do."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, policy: Policy, *, main: Place, sweep: CacheSweep
    ) -> None:
        """`sweep` is what they do."""
        super().__init__(decoder, cache, policy, main=main)
        self.between_s: list[float] = []
        """From the end of each pass to the begin of the next."""
        self._sweep = sweep
        self._ended_s = time.perf_counter()

    def _run_layers(self, given: PassInput, layer_begins: Callable[[int], None]) -> BrokenRows:
        self.between_s.append(time.perf_counter() - self._ended_s)
        self._sweep()
        self._ended_s = time.perf_counter()
        return BrokenRows()

    def give_up(self) -> None:
        """Nothing is in work."""

    @property
    def num_ended(self) -> int:
        return len(self.between_s)

    def doing(self) -> str:
        return f"pass {len(self.between_s)}"

    def interrupt(self, error: BaseException) -> None:
        """Nobody does."""
