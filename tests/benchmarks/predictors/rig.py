"""An engine on an emulated device that answers the same rows again and again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType

import torch

from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.device import Device
from moebatch.engine.model_files import ModelFiles
from moebatch.engine.order import Order
from moebatch.job.hints import load_predictor
from moebatch.schedule.foresight import LayerForesight
from moebatch.schedule.timeline import Timeline
from moebatch.spec.hardware import Hardware
from moebatch.spec.job import Job
from moebatch.spec.policy import CacheRule, Placement, Policy, Schedule, pages_of
from moebatch.store.packed import CHUNK_BYTES
from tests.benchmarks.predictors.rows import Pass, Rows

_MOST_PASSES = 10**6
_MOST_PROMPT_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How rows are answered."""

    predictor: str
    schedule: Schedule
    resident: float = 0.5
    """Share of the experts that stays."""
    cache: CacheRule = "lru"
    num_slots: int = 4
    """Through which the others come."""
    chunk_bytes: int = CHUNK_BYTES

    def policy(self, rows: Rows, batch_size: int) -> Policy:
        """Everything but experts lives on the device."""
        return Policy(
            batch_size=batch_size,
            micro_batch_size=batch_size,
            tokens_per_pass=_MOST_PROMPT_TOKENS,
            num_slots=self.num_slots,
            num_kv_pages=batch_size * pages_of(rows.longest),
            weights=Placement(vram=self.resident, dram=1 - self.resident),
            kv_cache=Placement(vram=1.0),
            attention_on_gpu=True,
            ffn_on_gpu=True,
            schedule=self.schedule,
            batching="static",
            cache=self.cache,
        )


@dataclass(frozen=True, kw_only=True)
class Round:
    """All rows answered once."""

    passes: list[Pass]
    timelines: list[Timeline]
    """Of each batch."""
    tokens: dict[str, tuple[int, ...]]
    """The answers by name."""


class Rig:
    """A setting, built. To be entered before it runs."""

    def __init__(
        self, setting: Setting, job: Job, files: ModelFiles, hardware: Hardware, rows: Rows
    ) -> None:
        self._rows = rows
        batch_size = len(rows.batches[0])
        experts = job.experts.model_copy(update={"predictor": setting.predictor})
        predictor, _ = load_predictor(job.model_copy(update={"experts": experts}), files)
        order = Order(
            files=files,
            policy=setting.policy(rows, batch_size),
            max_tokens=rows.longest,
            device=Device(kind="emulate", hardware=hardware, num_threads=1),
            predictor=predictor,
            shares=False,  # or rows that come again would have been computed
            num_traced_passes=_MOST_PASSES,
            chunk_bytes=setting.chunk_bytes,
        )
        self.built: BuiltEngine = build_engine(
            order,
            decoder=rows.preparation.reader.tokenizer,
            end_tokens=rows.preparation.end_tokens,
            job_seed=0,
        )

    def __enter__(self) -> "Rig":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.built.close()

    @property
    def foresight(self) -> Mapping[int, LayerForesight]:
        """How well experts have been foreseen so far, by layer."""
        return self.built.foresight.layers

    def run(self) -> Round:
        """Answers all rows, batch by batch."""
        recorder, log = self.built.recorder, self.built.log
        assert recorder is not None and log is not None, "passes are kept"
        passes: list[Pass] = []
        timelines: list[Timeline] = []
        tokens: dict[str, tuple[int, ...]] = {}
        for batch in self._rows.batches:
            num_before = len(log.passes)
            recorder.begin()
            with torch.inference_mode():
                for outcome in self.built.engine.run(batch):
                    assert outcome.error is None, outcome.error
                    tokens[outcome.request.custom_id] = outcome.choices[0].tokens
            timelines.append(recorder.timeline)
            loads = [one.loads for one in log.passes[num_before:]]
            passes += map(Pass.of, loads, recorder.timeline.pass_s)
        return Round(passes=passes, timelines=timelines, tokens=tokens)


def with_link(hardware: Hardware, bytes_per_s: float) -> Hardware:
    """The machine with links to its GPU of another rate."""
    links = {
        name: replace(link, bandwidth=bytes_per_s, staging_bandwidth=None)
        if "vram" in name
        else link
        for name, link in hardware.links.items()
    }
    return replace(hardware, links=links)
