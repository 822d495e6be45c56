"""Passes with what they read and write."""

from dataclasses import dataclass, field

from moebatch.engine.passes import Passes
from moebatch.engine.tail import Tail
from moebatch.model.gating_count import GatingCount
from moebatch.schedule.foresight import Foresight
from moebatch.store.device_memory import DeviceMemory
from moebatch.store.experts import ExpertStore
from moebatch.store.kv import KVCache


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What has been built for a job."""

    passes: Passes
    experts: ExpertStore
    """Those in main memory."""
    cache: KVCache
    tail: Tail | None = None
    """Where memory can go from the cache to experts."""
    memory: DeviceMemory | None = None
    """Of the GPU, where there is one."""
    gating_count: GatingCount | None = None
    """What was left out of the choices of gates; None if nothing may be."""
    foresight: Foresight = field(default_factory=Foresight)
    """How well experts have been foreseen so far."""
