"""What an engine is built from: a model under a policy, and what belongs to the job."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.approximation import EXACT, Approximation
from moebatch.engine.device import IN_MAIN_MEMORY, Device
from moebatch.engine.passes.text_losses import TextLosses
from moebatch.layout.footprint import window_pages
from moebatch.layout.ladder import Ladder
from moebatch.layout.placed import CHUNK_BYTES, Hottest, PlacedModel
from moebatch.layout.scratch import Limits, limits_of
from moebatch.model.rope import Rope
from moebatch.predict.correlation import CorrelationPredictor
from moebatch.predict.learnt_files import empty_table
from moebatch.predict.predictor import Predictor, RoutingObserver
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.model.cache import CacheGroup
from moebatch.spec.policy.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """Everything that an engine is built from."""

    files: ModelFiles
    policy: Policy
    max_tokens: int
    """The longest sequence, prompt and answer, that passes may meet."""
    device: Device = IN_MAIN_MEMORY
    approximation: Approximation = EXACT
    """What changes the answers."""
    is_plain: bool = False
    """Everything one after the other, in main memory, instead of the policy's schedule."""
    predictor: Predictor | None = None
    """Which experts next; None learns their frequencies as it goes."""
    hottest: Hottest | None = None
    """Experts by layer, those that are chosen most often first: these stay. None is by number."""
    observer: RoutingObserver | None = None
    """Learns what the gates choose."""
    losses: TextLosses | None = None
    """Learns how surely the model expects the texts that are its requests."""
    scratch: Path | None = None
    """Folder for keys and values, and weights outside experts, that live on disk."""
    shares: bool = True
    """Sequences that begin alike compute that beginning once and hold it together."""
    plans_tail: bool = True
    """When no sequence waits any more, experts get the memory of pages that nothing needs."""
    num_traced_passes: int = 0
    """Passes whose timeline is kept task by task."""
    chunk_bytes: int = CHUNK_BYTES
    """Most bytes of an expert that go up to a GPU at once."""

    def __post_init__(self) -> None:
        assert not (self.observer and self.num_traced_passes), "one looks at the gates"
        within = self.files.shape.attending_within(self.max_tokens)
        object.__setattr__(self, "files", replace(self.files, shape=within))

    @property
    def shares_prefixes(self) -> bool:
        """Whether sequences that begin alike hold that beginning together."""
        return self.shares and shares_beginnings(self.files, self.max_tokens)

    @property
    def ladder(self) -> Ladder:
        """The levels that are used."""
        return IN_MAIN_MEMORY.ladder if self.is_plain else self.device.ladder

    @property
    def placed(self) -> PlacedModel:
        """The model under the policy."""
        return PlacedModel(self.files.shape, self.policy, self.ladder)

    @property
    def homes(self) -> Mapping[LevelName, list[ExpertKey]]:
        return self.placed.expert_homes(self.hottest)

    @property
    def limits(self) -> Limits:
        """The largest pieces of work."""
        max_cached = self.cache_groups[0].num_rows(self.max_tokens)
        limits = limits_of(self.policy, max_tokens=max_cached)
        return limits if self.losses is None else replace(limits, ending_tokens=limits.pass_tokens)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Layers by what the cache holds of sequences."""
        return self.files.shape.cache_groups(self.max_tokens)

    @property
    def window_pages(self) -> tuple[int, ...]:
        """Pages of the largest micro-batch, in each group of layers."""
        return tuple(
            window_pages(self.policy, group, max_tokens=self.max_tokens)
            for group in self.cache_groups
        )

    def new_predictor(self) -> Predictor:
        """The one that is given, or one that starts from how often each expert is chosen."""
        if self.predictor is not None:
            return self.predictor
        return CorrelationPredictor(empty_table(self.files.shape, 0))


def shares_beginnings(files: ModelFiles, max_tokens: int) -> bool:
    """Whether tokens that begin sequences of at most so many alike have the same keys in all of
    them, and keep them: some rotary scalings depend on the length of the sequence, tokens that are
    encoded on all others of their prompt, and what layers with windows, or states, hold of it is
    written over."""
    if files.shape.encoder is not None:
        return False
    ropes = Rope.of_model(files)
    if not all(group.is_whole for group in files.shape.cache_groups(max_tokens)):
        return False
    return not any(rope.depends_on_length for rope in {*ropes})
