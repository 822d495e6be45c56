"""Every piece of memory that a run takes, by name and level."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from moebatch.layout.admission import AHEAD_TOKENS
from moebatch.layout.division import Division
from moebatch.layout.footprint import (
    ACTIVATIONS_TERM,
    FLOAT_BYTES,
    Buffer,
    Dtypes,
    Footprint,
    dense_bytes,
    layer_bytes,
    most_window_pages,
    packed_bytes,
    page_bytes,
    slot_bytes,
)
from moebatch.layout.ladder import Ladder
from moebatch.layout.scratch import (
    SAMPLING_LOGITS,
    Limits,
    attention_core_elements,
    block_rows,
    bucket_rows,
    decoder_buffers,
    gemm_rows,
    limits_of,
    needs_matrix,
    num_library_products,
)
from moebatch.once import once
from moebatch.schedule.setup import NUM_LAYER_PLACES
from moebatch.schedule.steps.attention import LOOK_AHEAD
from moebatch.schedule.steps.kv import NUM_WINDOWS
from moebatch.schedule.steps.kv_route import WindowName, windows
from moebatch.spec.machine.hardware import LEVELS, LevelName
from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.model.cache_layout import CacheLayout
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.policy.policy import Policy
from moebatch.spec.workload import Workload

PROGRAM_TERM = "program and libraries"
DENSE_TERM = "weights outside experts"
KV_TERM = "keys and values"
KV_WINDOW_TERM = "keys and values in work"
RESIDENT_TERM = "resident experts"
SLOTS_TERM = "expert slots"
PROJECTIONS_TERM = "projections"
SPARE_TERM = "what rounding to whole layers and experts brings down"
LIBRARY_BYTES = 192 * 2**20
"""What the allocator cannot reuse and oneDNN keeps for its primitives, one for every row count and
shape, where it does all products; measured on jobs of many shapes. Its buffers grow with the
matrices and come on top."""
_OWN_KERNELS_BYTES = 16 * 2**20
"""The same where the program's own kernels run, and in float32, of which nothing is kept (171 row
counts of one matrix: 0 MB, in bfloat16 104 MB): the first use of oneDNN (7 MB), and what Python's
heap grows by during a run."""
_PRODUCT_BYTES = 600 * 2**10
"""What oneDNN keeps of a product of one row count and one matrix shape, whatever their sizes;
measured in bfloat16 by AVX512-BF16, from 1 to 1,536 rows and 8 to 32,000 columns."""
_KNOWN_TOKEN_BYTES = 40
"""A token of a prompt or an answer, as an object of Python's."""
_KNOWN_ROW_BYTES = 1500
"""The row itself, its request, sampling and sequence (rows of 12 tokens: 1,420 B beside them)."""
_READ_WINDOW_BYTES = 17 * 2**20
"""Window through which the weights outside experts are read, before the first pass."""
_SAMPLING_LOGIT_BYTES = 88
"""What choosing tokens from a logit takes, `SAMPLING_LOGITS` of them at a time in wider types: 30
MB to draw, 82 MB with penalties, log-probabilities and top-p (measured at 32,000 and 152,000
tokens)."""
_LIKELIEST_BYTES = 8 * 2**20
"""The same where only the likeliest tokens are wanted."""
_GRAMMARS_BYTES = 112 * 2**20
"""What tokens are sorted into where answers are held to grammars (104 MB of 152,000 tokens)."""
_HELD_BYTES = 16 * 2**10
_HELD_TOKEN_BYTES = 128
"""Of such an answer, and of each of its tokens (116 KB of 1,004 tokens of JSON)."""
_WORKSPACES_BYTES = 64 * 2**20
"""Of a GPU's libraries for matrix products."""
_PAGES_GAP_BYTES = 2**20
"""What the gaps between pages take in a staging buffer."""


class CachePages(NamedTuple):
    """Pages of the cache, or of a window of it, in some layers that are alike."""

    name: str
    level: LevelName
    term: str
    page_bytes: int
    layers: float
    """Or windows, each of which has all of the pages."""
    most_pages: int
    """With more pages in all it has no more than these."""


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from them is worked out once
class MemoryUse:
    """What a run of a model holds on the levels of a machine, whatever the policy."""

    shape: ModelShape
    dtypes: Dtypes
    workload: Workload
    program_bytes: Mapping[LevelName, int]
    """What the process holds on a level before any weight is loaded."""
    ladder: Ladder
    """Weights outside experts and activations are at its top."""
    instruction_set: str = ""
    """That of the program's own kernels on the CPU; empty where torch does their work."""

    def footprints(
        self, policy: Policy, division: Division | None = None
    ) -> dict[LevelName, Footprint]:
        """Bytes of all `buffers` by level and term."""
        if division is None:
            division = self._whole_division(policy)
        terms = self._beside_cache(policy, division)
        _add(terms, self._cache(policy, division))
        return _whole(terms)

    def beside_cache(self, policy: Policy, division: Division) -> dict[LevelName, Footprint]:
        """The same without the cache, over which the number of pages decides."""
        return _whole(self._beside_cache(policy, division))

    def _beside_cache(self, policy: Policy, division: Division) -> "_Terms":
        terms = {level: {**of_level} for level, of_level in self._usual(policy).terms.items()}
        _add(terms, self._experts(policy, division))
        return terms

    def buffers(self, policy: Policy, division: Division | None = None) -> list[Buffer]:
        """All that is held at the peak under `policy`, with names that are unique on a level.

        Experts on disk stay in the checkpoint and take no room of their own. `division` is how
        shares become experts and layers; None is as a run has them.
        """
        if division is None:
            division = self._whole_division(policy)
        return [
            *self._usual(policy).buffers,
            *self._experts(policy, division),
            *self._cache(policy, division),
        ]

    def _whole_division(self, policy: Policy) -> Division:
        return Division.of(self.shape, self.groups, policy, self.ladder)

    def _usual(self, policy: Policy) -> "_Usual":
        """What does not depend on what lives where: many policies share it."""
        key = (
            policy.batch_size,
            policy.micro_batch_size,
            policy.tokens_per_pass,
            policy.attention_on_gpu,
            policy.ffn_on_gpu,
            policy.streamed_layers,
        )
        return once(self._known, key, lambda: self._usual_of(policy))

    def _usual_of(self, policy: Policy) -> "_Usual":
        terms = _no_terms()
        buffers = [*self._program(policy), *self._activations(policy)]
        _add(terms, buffers)
        dense = [*self._dense(policy, terms["dram"].get(ACTIVATIONS_TERM, 0))]
        _add(terms, dense)
        return _Usual([*buffers, *dense], terms)

    @cached_property
    def _known(self) -> dict[Hashable, "_Usual"]:
        return {}

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Layers by what the cache holds of sequences."""
        return self.shape.cache_groups(self.workload.max_total_tokens)

    @property
    def _with_vram(self) -> bool:
        return "vram" in self.ladder.levels

    def _program(self, policy: Policy) -> Iterator[Buffer]:
        for level, num_bytes in self.program_bytes.items():
            yield Buffer("program", level, PROGRAM_TERM, num_bytes)
            if level != "disk":
                yield Buffer("libraries", level, PROGRAM_TERM, self._library_bytes(policy))
        if self._keeps_little:
            yield Buffer("rows in work", "dram", PROGRAM_TERM, self._row_bytes(policy))

    @property
    def _keeps_little(self) -> bool:
        """Whether most products are such of which oneDNN keeps nothing: those of the program's own
        kernels, which do not compute by AMX, and those in float32, whoever multiplies."""
        is_left = self.instruction_set in ("", "amx") and self.dtypes.compute != "float32"
        return not self._with_vram and not is_left

    def _library_bytes(self, policy: Policy) -> int:
        shape, dtypes = self.shape, self.dtypes
        widths = shape.hidden_size + max(shape.expert_width, shape.dense_width)
        grown = 2 * gemm_rows(policy) * widths * dtypes.compute_bytes
        if not self._keeps_little:
            return LIBRARY_BYTES + grown
        if dtypes.compute == "float32":
            return _OWN_KERNELS_BYTES + grown
        products = num_library_products(
            shape, self._limits(policy), dtypes.compute, self.instruction_set
        )
        return _OWN_KERNELS_BYTES + products * _PRODUCT_BYTES

    def _row_bytes(self, policy: Policy) -> float:
        """Sequences in work and those that are looked ahead, with their tokens."""
        work, total = self.workload, self.workload.num_sequences
        in_work = policy.batch_size if total is None else min(policy.batch_size, total)
        waiting = AHEAD_TOKENS / work.mean_prompt_tokens
        if total is not None:
            waiting = min(waiting, total - in_work)
        num_tokens = in_work * work.mean_total_tokens + waiting * work.mean_prompt_tokens
        return num_tokens * _KNOWN_TOKEN_BYTES + (in_work + waiting) * _KNOWN_ROW_BYTES

    def _dense(self, policy: Policy, activation_bytes: float) -> Iterator[Buffer]:
        top, below = self.ladder.top, self.ladder.below(self.ladder.top)
        streamed = self.shape.streamed(policy.streamed_layers)
        sizes = [layer_bytes(self.shape, self.dtypes.compute_bytes, layer) for layer in streamed]
        moving = sum(self.shape.streamed_params[layer] for layer in streamed)
        staying = dense_bytes(self.shape, self.dtypes) - moving * self.dtypes.compute_bytes
        yield Buffer(DENSE_TERM, top, DENSE_TERM, staying)
        largest = max(sizes, default=0)
        if below is not None and sizes:
            places = min(NUM_LAYER_PLACES, len(sizes))
            yield Buffer("weights of layers in work", top, DENSE_TERM, largest, 1, places)
            yield Buffer("weights of layers below", below, DENSE_TERM, sum(sizes))
        # They are read before anything is computed: what is computed then has that room.
        window = max(0.0, _READ_WINDOW_BYTES + largest - activation_bytes)
        yield Buffer("window of the loader", "dram", "reading", window)

    def _limits(self, policy: Policy) -> Limits:
        return limits_of(policy, max_tokens=self.workload.max_cached_tokens)

    def _activations(self, policy: Policy) -> Iterator[Buffer]:
        """What a pass needs beside weights and cache, at its largest."""
        yield from self._computing(policy, self.ladder.top)
        yield from self._choosing(policy)
        if not self._with_vram:
            return
        if not policy.ffn_on_gpu:
            yield from self._computing(policy, "dram")
        elif not policy.attention_on_gpu:
            yield from self._attending(policy, "dram")
        if not policy.attention_on_gpu:
            width = max(each.sent_width + each.result_width for each in self.shape.attentions)
            num_elements = bucket_rows(policy.micro_batch_size) * width
            sizes = num_elements, self.dtypes.compute_bytes, LOOK_AHEAD + 1
            for level in ("vram", "dram"):
                yield Buffer(PROJECTIONS_TERM, level, PROJECTIONS_TERM, *sizes)

    def _computing(self, policy: Policy, level: LevelName) -> Iterator[Buffer]:
        """What a decoder and the passes that it computes take."""
        limits, num_bytes = self._limits(policy), self.dtypes.compute_bytes
        instruction_set = self.instruction_set if level == "dram" else ""
        converts = needs_matrix(self.dtypes.stored, self.dtypes.compute, instruction_set)
        yield from decoder_buffers(self.shape, limits, num_bytes, level, converts=converts)
        yield self._seen(policy, level)
        if self._keeps_little:
            rotary_dim = sum(attention.rotary_dim for attention in self.shape.attentions)
            rotations = policy.tokens_per_pass * rotary_dim
            yield Buffer("rotations", level, ACTIVATIONS_TERM, rotations, FLOAT_BYTES, 2)

    def _attending(self, policy: Policy, level: LevelName) -> Iterator[Buffer]:
        """The same where only decoding sequences attend."""
        core = attention_core_elements(self.shape, self._limits(policy))
        num_bytes = self.dtypes.compute_bytes
        yield Buffer("gathered keys and values", level, ACTIVATIONS_TERM, core, num_bytes)
        yield self._seen(policy, level)

    def _seen(self, policy: Policy, level: LevelName) -> Buffer:
        num_heads = max(attention.num_heads for attention in self.shape.attentions)
        num_scores = self._limits(policy).kv_rows * num_heads
        return Buffer("scores and masks", level, ACTIVATIONS_TERM, num_scores, FLOAT_BYTES, 2)

    def _choosing(self, policy: Policy) -> Iterator[Buffer]:
        """Where a GPU chooses tokens it makes a whole block of logits float32."""
        num_rows = block_rows(self.shape, self._limits(policy), self.dtypes.compute_bytes)
        num_logits = num_rows * self.shape.vocab_size
        at_once = min(num_logits, SAMPLING_LOGITS)
        likeliest = self.workload.takes_likeliest
        sampling = _LIKELIEST_BYTES if likeliest else at_once * _SAMPLING_LOGIT_BYTES
        yield Buffer("sampling", "dram", ACTIVATIONS_TERM, sampling)
        yield from self._held(policy)
        if self._with_vram:
            yield Buffer("logits in float32", "vram", ACTIVATIONS_TERM, num_logits, FLOAT_BYTES)
            yield Buffer("workspaces", "vram", ACTIVATIONS_TERM, _WORKSPACES_BYTES)

    def _held(self, policy: Policy) -> Iterator[Buffer]:
        """Half of their tokens have come, at the mean."""
        num_held = policy.batch_size * self.workload.share_held
        if num_held:
            of_answer = _HELD_BYTES + _HELD_TOKEN_BYTES * self.workload.mean_new_tokens / 2
            yield Buffer("tokens of grammars", "dram", ACTIVATIONS_TERM, _GRAMMARS_BYTES)
            yield Buffer("answers by grammars", "dram", ACTIVATIONS_TERM, of_answer, 1, num_held)

    def _experts(self, policy: Policy, division: Division) -> Iterator[Buffer]:
        sizes = self.expert_sizes
        for level, num_bytes in sizes.items():
            yield Buffer(RESIDENT_TERM, level, RESIDENT_TERM, num_bytes, 1, division.experts[level])
            spare = division.spare_experts.get(level, 0)
            yield Buffer("spare experts", level, SPARE_TERM, num_bytes, 1, spare)
        computed = self.ladder.experts_at(policy)
        yield Buffer(SLOTS_TERM, computed, SLOTS_TERM, sizes[computed], 1, division.num_slots)
        below = division.num_slots_below
        yield Buffer("expert slots below", "dram", SLOTS_TERM, sizes["dram"], 1, below)
        if self.ladder.copies_through_buffers(policy) and division.num_staged:
            yield Buffer("staging", "dram", "staging", sizes["vram"], 1, division.num_staged)
            yield Buffer("gaps between pages", "dram", "staging", _PAGES_GAP_BYTES)

    @cached_property
    def expert_sizes(self) -> Mapping[LevelName, int]:
        """Room of one expert on each level that has any."""
        return {
            "vram": packed_bytes(self.shape, self.dtypes),
            "dram": slot_bytes(self.shape, self.dtypes),
        }

    @cached_property
    def _pages(self) -> tuple[int, ...]:
        """Bytes of a page of each group."""
        return tuple(page_bytes(group, self.dtypes) for group in self.groups)

    def _cache(self, policy: Policy, division: Division) -> Iterator[Buffer]:
        for one in self.cache_pages(policy, division):
            count = one.layers * min(policy.num_kv_pages, one.most_pages)
            yield Buffer(one.name, one.level, one.term, one.page_bytes, 1, count)

    def cache_pages(self, policy: Policy, division: Division) -> Iterator[CachePages]:
        """What the cache is made of, whatever the number of its pages."""
        for number, (group, of_page) in enumerate(zip(self.groups, self._pages, strict=True)):
            which = f" of group {number + 1}" if number else ""
            most = group.most_pages(policy.batch_size)
            for level in LEVELS:
                if count := division.kv_layers[level][number]:
                    yield CachePages(KV_TERM + which, level, KV_TERM, of_page, count, most)
            for level, spare in division.spare_layers.items():
                name = f"spare layers{which}"
                yield CachePages(name, level, SPARE_TERM, of_page, spare[number], most)
        places = frozenset({self.ladder.top, self.ladder.attends_at(policy)})
        for window in windows(division.kv_homes, places, self.ladder.top):
            yield from self._windows(policy, window)

    def _windows(self, policy: Policy, name: WindowName) -> Iterator[CachePages]:
        """Groups whose rows are alike share one, as large as one of them needs."""
        most_tokens = self.workload.max_total_tokens
        sizes: dict[CacheLayout, tuple[int, int]] = {}
        for group, of_page in zip(self.groups, self._pages, strict=True):
            most = most_window_pages(policy, group, max_tokens=most_tokens)
            if most > sizes.get(group.layout, (0, of_page))[0]:
                sizes[group.layout] = most, of_page
        for number, (most, of_page) in enumerate(sizes.values()):
            which = f" of rows {number + 1}" if number else ""
            title = f"window on {name.level} at {name.place}{which}"
            yield CachePages(title, name.level, KV_WINDOW_TERM, of_page, NUM_WINDOWS, most)


_Terms = dict[LevelName, dict[str, float]]
"""Bytes by level, then by what they are for."""


class _Usual(NamedTuple):
    """Buffers, and what they come to."""

    buffers: list[Buffer]
    terms: _Terms


def _no_terms() -> _Terms:
    return {level: {} for level in LEVELS}


def _add(terms: _Terms, buffers: Iterable[Buffer]) -> None:
    for buffer in buffers:
        of_level = terms[buffer.level]
        of_level[buffer.term] = of_level.get(buffer.term, 0) + buffer.num_bytes


def _whole(terms: _Terms) -> dict[LevelName, Footprint]:
    return {
        level: Footprint(terms={name: ceil(total) for name, total in of_level.items() if total > 0})
        for level, of_level in terms.items()
    }
