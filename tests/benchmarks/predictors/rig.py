"""An engine on an emulated device that answers rows again and again."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal

import torch

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.build import BuiltEngine, build_engine
from moebatch.engine.device import Device
from moebatch.engine.spec import EngineSpec
from moebatch.job.hints import Hints
from moebatch.job.opened import load_approximation
from moebatch.rows.prompts import open_reader
from moebatch.schedule.drivers.foresight import LayerForesight
from moebatch.schedule.task import Kind
from moebatch.schedule.timeline.timeline import Timeline
from moebatch.spec.job import Job
from moebatch.spec.machine.hardware import Hardware
from moebatch.spec.policy.policy import CacheRule, Placement, Policy, pages_of
from moebatch.store.experts.packed import PackedLayout
from tests.benchmarks.predictors.rows import Batches, Pass

_MOST_PASSES = 10**6


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What all settings stand on."""

    job: Job
    files: ModelFiles
    hardware: Hardware
    batch_size: int
    longest: int
    """Most tokens of a sequence."""
    least_s: Mapping[Kind, float] = field(default_factory=dict)
    """Seconds that tasks of the emulated GPU take at least."""

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return PackedLayout.of(self.files.expert_records().values()).num_bytes

    def with_link(self, bytes_per_s: float) -> "Ground":
        """The same with links to the GPU of that rate."""
        links = {
            name: replace(link, bandwidth=bytes_per_s, staging_bandwidth=None)
            if "vram" in name
            else link
            for name, link in self.hardware.links.items()
        }
        return replace(self, hardware=replace(self.hardware, links=links))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How rows are answered."""

    predictor: str
    schedule: str
    resident: float = 0.5
    """Share of the experts for which the device has room: for those that stay, and for those that
    come and go."""
    cache: CacheRule = "lru"
    num_chunks: int = 1
    """In which an expert comes."""
    gating: Literal["exact", "adaptive", "pre-gated"] = "exact"
    """Settings of the same gating answer alike."""

    def policy(self, ground: Ground) -> Policy:
        """Everything but experts lives on the device. Slots for experts on their way are those of a
        token at two layers; the rest is cache, as all of it is in ProMoE."""
        shape = ground.files.shape
        num_slots = 2 * shape.experts_per_token
        num_slots = 0 if self.resident == 1 else num_slots
        share = self.resident - num_slots / (shape.num_experts * len(shape.moe_layers))
        return Policy(
            batch_size=ground.batch_size,
            micro_batch_size=ground.batch_size,
            tokens_per_pass=ground.batch_size * ground.longest,
            num_slots=num_slots,
            num_kv_pages=ground.batch_size * pages_of(ground.longest),
            weights=Placement(vram=share, dram=1 - share),
            kv_cache=Placement(vram=1.0),
            attention_on_gpu=True,
            ffn_on_gpu=True,
            schedule=self.schedule,
            batching="static",
            cache=self.cache,
        )


ALL_RESIDENT = Setting(predictor="none", schedule="klotski", resident=1.0, cache="static")
"""Nothing has to come."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Some rows answered once."""

    passes: list[Pass]
    timelines: list[Timeline]
    """Of each batch."""
    tokens: dict[str, tuple[int, ...]]
    """The answers by name."""


class Rig:
    """A setting, built. To be closed."""

    def __init__(self, setting: Setting, ground: Ground) -> None:
        job, files = ground.job, ground.files
        asked = {"predictor": setting.predictor, "gating": setting.gating}
        job = job.model_copy(update={"experts": job.experts.model_copy(update=asked)})
        hints = Hints(job, files)
        order = EngineSpec(
            files=files,
            policy=setting.policy(ground),
            max_tokens=ground.longest,
            device=Device(kind="emulate", hardware=ground.hardware, least_s=ground.least_s),
            approximation=load_approximation(job, files),
            predictor=hints.predictor(hints.resolved(hints.wishes.predictor)),
            hottest=hints.hottest,
            shares=False,  # or rows that come again would have been computed
            num_traced_passes=_MOST_PASSES,
            chunk_bytes=-(-ground.expert_bytes // setting.num_chunks),
        )
        shape = files.shape
        reader = open_reader(job, vocab_size=shape.vocab_size, max_positions=shape.max_positions)
        self.built: BuiltEngine = build_engine(
            order,
            decoder=reader.tokenizer,
            end_tokens=reader.end_tokens,
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

    @property
    def single_share(self) -> float | None:
        """Gates' decisions for a single expert among all, where some are left out."""
        count = self.built.gating_count
        return count.single_share if count else None

    def run(self, batches: Batches) -> Round:
        """Answers rows, batch by batch."""
        recorder, log = self.built.recorder, self.built.log
        assert recorder is not None and log is not None, "passes are kept"
        done = Round(passes=[], timelines=[], tokens={})
        for batch in batches:
            num_before = len(log.passes)
            recorder.begin()
            with torch.inference_mode():
                for outcome in self.built.engine.run(batch):
                    assert outcome.error is None, outcome.error
                    done.tokens[outcome.request.custom_id] = outcome.choices[0].tokens
            done.timelines.append(recorder.timeline)
            loads = [one.loads for one in log.passes[num_before:]]
            done.passes.extend(map(Pass.of, loads, recorder.timeline.pass_s))
        return done
