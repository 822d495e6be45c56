"""The policy that a memory budget allows: what comes first when there is not room for all."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from moebatch.errors import DoesNotFit
from moebatch.plan.footprint import (
    KV_TERM,
    Dtypes,
    Footprint,
    footprint,
    kv_page_bytes,
    slot_bytes,
)
from moebatch.spec.policy import Policy, pages_of
from moebatch.spec.shape import ModelShape
from moebatch.spec.workload import Workload
from moebatch.units import format_bytes

MICRO_BATCH_SIZE = 256
MAX_BATCH_SIZE = 2048
BUSY_BATCH_SIZE = 256
"""Sequences from which on decoding is bound by arithmetic where nothing is streamed."""
SLOTS = 6
"""Enough for two readers and the compute to be apart; more bring nothing, three cost 5 %."""
BALANCE_FLOP_PER_BYTE = 450
"""Arithmetic that hides under the transfer of one byte: a CPU's achieved GEMM rate over the rate
of its disk. Until a hardware profile says better."""
TOKENS_PER_PASS = (256, 4096)
_KV_SLACK = 1.1
"""Pages beyond the mean need, since lengths vary from pass to pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Finds the largest policy within a budget.

    First the least that runs at all. Then, as far as memory goes: slots, tokens of a pass until
    arithmetic balances the transfer, cache for the sequences that such passes hold, and with what
    is left experts that need not be streamed. A byte of cache adds 1/(cache in use) to the tokens
    of a pass, a byte of residents takes 1/(bytes streamed) from its time, and the cache in use is
    far smaller; so the cache comes first until it is as large as the stream.
    """

    shape: ModelShape
    dtypes: Dtypes
    workload: Workload
    program_bytes: int
    budget_bytes: int

    def policy(self) -> Policy:
        """Raises DoesNotFit, with need, have, largest term and a way out, if nothing fits."""
        policy = self._smallest()
        self._check(policy)
        policy = self._largest(self._with_slots, policy, policy.num_slots, self._slots_wanted)
        policy = self._largest(self._with_tokens, policy, *self._tokens_range())
        sequences = min(self.workload.num_sequences, MAX_BATCH_SIZE, policy.tokens_per_pass)
        policy = replace(policy, batch_size=sequences)
        return self._all_resident(policy) or self._streaming(policy)

    def footprint(self, policy: Policy) -> Footprint:
        """Bytes that `policy` takes."""
        return footprint(
            self.shape,
            policy,
            dtypes=self.dtypes,
            program_bytes=self.program_bytes,
            max_tokens=self.workload.max_total_tokens,
        )

    def _smallest(self) -> Policy:
        return Policy(
            batch_size=1,
            micro_batch_size=MICRO_BATCH_SIZE,
            tokens_per_pass=min(64, TOKENS_PER_PASS[0]),
            num_slots=min(2, self._num_experts),
            num_resident=0,
            num_kv_pages=pages_of(self.workload.max_total_tokens),
        )

    def _check(self, policy: Policy) -> None:
        needed = self.footprint(policy)
        if needed.total_bytes <= self.budget_bytes:
            return
        name, num_bytes = needed.largest
        lines = [
            f"dram: needs {format_bytes(needed.total_bytes)} at the least, "
            f"has {format_bytes(self.budget_bytes)} (resources.dram).",
            f"Largest term: {name}, {format_bytes(num_bytes)}"
            + ("; lower max_tokens or shorten the longest prompt." if name == KV_TERM else "."),
            f"Smallest change that fits: resources.dram: {_round_up_mib(needed.total_bytes)}MiB.",
        ]
        raise DoesNotFit("\n".join(lines))

    def _tokens_range(self) -> tuple[int, int]:
        """Tokens of a pass: the least, and as many as balance the streaming of all experts."""
        active = self.shape.resident_params - self.shape.embedding_params
        layers = len(self.shape.moe_layers)
        active += layers * self.shape.experts_per_token * self.shape.expert_params
        streamed = self._num_experts * slot_bytes(self.shape, self.dtypes)
        balance = BALANCE_FLOP_PER_BYTE * streamed // (2 * active)
        least, most = TOKENS_PER_PASS
        return 64, min(max(balance, least), most)

    @property
    def _slots_wanted(self) -> int:
        return min(SLOTS, self._num_experts)

    @staticmethod
    def _with_slots(policy: Policy, slots: int) -> Policy:
        return replace(policy, num_slots=slots)

    @staticmethod
    def _with_tokens(policy: Policy, tokens: int) -> Policy:
        return replace(policy, tokens_per_pass=tokens)

    def _pages_for(self, sequences: int) -> int:
        """Pages for so many sequences of mean length, half-filled last pages counted."""
        pages_each = pages_of(int(self.workload.mean_total_tokens)) + 1
        return int(sequences * pages_each * _KV_SLACK)

    def _all_resident(self, policy: Policy) -> Policy | None:
        """Nothing is streamed, if that leaves a cache for a batch that keeps the cores busy."""
        policy = replace(policy, num_slots=0, num_resident=self._num_experts)
        if not self._fits(policy):
            return None
        policy = self._with_cache(policy, self._pages_for(policy.batch_size))
        enough = self._pages_for(min(policy.batch_size, BUSY_BATCH_SIZE))
        return policy if policy.num_kv_pages >= enough else None

    def _streaming(self, policy: Policy) -> Policy:
        streamed = self._num_experts * slot_bytes(self.shape, self.dtypes)
        balance = streamed // kv_page_bytes(self.shape, self.dtypes)
        policy = self._with_cache(policy, min(self._pages_for(policy.batch_size), balance))
        return self._largest(
            lambda base, count: replace(base, num_resident=count), policy, 0, self._num_experts - 1
        )

    def _with_cache(self, policy: Policy, wanted_pages: int) -> Policy:
        least = policy.num_kv_pages
        return self._largest(
            lambda base, pages: replace(base, num_kv_pages=pages),
            policy,
            least,
            max(least, wanted_pages),
        )

    def _largest(
        self, change: Callable[[Policy, int], Policy], policy: Policy, least: int, most: int
    ) -> Policy:
        """`policy` changed by the largest value from `least` to `most` that fits."""
        while least < most:
            middle = (least + most + 1) // 2
            if self._fits(change(policy, middle)):
                least = middle
            else:
                most = middle - 1
        return change(policy, least)

    def _fits(self, policy: Policy) -> bool:
        return self.footprint(policy).total_bytes <= self.budget_bytes

    @property
    def _num_experts(self) -> int:
        return len(self.shape.moe_layers) * self.shape.num_experts


def _round_up_mib(num_bytes: int) -> int:
    return -(-num_bytes // 2**20)
