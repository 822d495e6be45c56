"""Room for experts whose layers go up in pages."""

from collections import Counter
from collections.abc import Collection, Iterable

from moebatch.schedule.slots.expert_load import ExpertKey


def num_paged_slots(experts: Iterable[ExpertKey], resident: Collection[ExpertKey]) -> int:
    """Slots beside those of residents: one layer computes while the next one comes, so twice the
    streamed experts of the layer that has most of them (MoE-Lightning, appendix A.1)."""
    return 2 * most_streamed(experts, resident)


def most_streamed(experts: Iterable[ExpertKey], resident: Collection[ExpertKey]) -> int:
    """Experts that are not resident, of the layer that has most of them."""
    living_here = frozenset(resident)
    streamed = Counter(key.layer for key in experts if key not in living_here)
    return max(streamed.values(), default=0)
