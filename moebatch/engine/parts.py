"""What a pipeline works with; all of it is there before the first pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from moebatch.engine.exchange import Exchange
from moebatch.engine.pass_log import PassLog
from moebatch.model.attention_core import AttentionCore
from moebatch.model.decoder import Decoder
from moebatch.predict.predictor import Predictor, RoutingObserver
from moebatch.schedule.foresight import Foresight
from moebatch.schedule.setup import Setup
from moebatch.schedule.slots.expert_load import ExpertKey
from moebatch.schedule.slots.slots import SlotQueue
from moebatch.spec.policy import Policy
from moebatch.store.kv import KVCache


class Experts(Protocol):
    """Experts where they are computed."""

    def tensors(self, key: ExpertKey) -> tuple[Tensor, ...]:
        """Matrices of an expert that has arrived."""


class Pages(Protocol):
    """Weights of steps that come in pages."""

    def tensors(self, step: int, expert: int) -> tuple[Tensor, ...]:
        """Matrices of an expert whose step is in place."""

    def stage(self, step: int, page: int, num_pages: int) -> None:
        """Copies a page into pinned memory."""

    def page(self, step: int, page: int, num_pages: int) -> None:
        """Brings a page to where it is computed."""

    def block(self, step: int) -> None:
        """Brings all pages at once."""

    def num_bytes(self, step: int, page: int = 0, num_pages: int = 1) -> int:
        """Bytes of a page."""

    def forget(self) -> None:
        """Nothing that has been brought is used any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Model, memory and what goes between them."""

    decoder: Decoder
    cache: KVCache
    policy: Policy
    setup: Setup
    predictor: Predictor
    slots: SlotQueue
    """Of the level that computes."""
    below: SlotQueue | None
    """Of main memory, where experts pass on their way from disk to a GPU."""
    experts: Experts | None
    """Those that come one by one."""
    pages: Pages | None
    """Those that come layer by layer."""
    core: AttentionCore | None
    """Of the CPU beside a GPU."""
    exchange: Exchange | None
    observer: RoutingObserver | None = None
    log: PassLog | None = None
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Where the thread that launches computes what comes before a pass and after it."""
    foresight: Foresight = field(default_factory=Foresight)
    """How well experts are foreseen at the level that computes."""
