"""Parts of a text that are read, and kept, one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass

from moebatch.calibration.placed_text import PlacedText
from moebatch.spec.policy import Policy, pages_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """Whole sequences."""

    sequences: range
    """Of the text, by number."""
    places: range
    """Of their tokens."""


def portions(text: PlacedText, policy: Policy, *, first: int) -> Iterator[Portion]:
    """The sequences from `first` on, in portions of about a full pass of the policy, the held-out
    ones apart from the others."""
    while first < len(text.sequences):
        last = text.num_counted if first < text.num_counted else len(text.sequences)
        end = first + _num_fitting(text, policy, range(first, last))
        yield portion(text, range(first, end))
        first = end


def portion(text: PlacedText, sequences: range) -> Portion:
    """These sequences, and where their tokens are."""
    places = range(text.place_behind(sequences.start), text.place_behind(sequences.stop))
    return Portion(sequences=sequences, places=places)


def _num_fitting(text: PlacedText, policy: Policy, sequences: range) -> int:
    """How many of them, at least one, have room in a pass: all of their tokens, the sequences
    themselves, and their keys."""
    most_places = text.place_behind(sequences.start) + policy.tokens_per_pass
    num_pages = 0
    for count, number in enumerate(sequences[: policy.batch_size]):
        num_pages += pages_of(len(text.sequences[number]) + 1)
        is_over = num_pages > policy.num_kv_pages or text.ends[number] > most_places
        if count and is_over:
            return count
    return min(len(sequences), policy.batch_size)
