"""What a policy will do: how fast, how long, how full, and what binds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moebatch.layout.footprint import cache_bytes, slot_bytes
from moebatch.layout.lanes import bottleneck, busiest_s
from moebatch.layout.load import PassLoad
from moebatch.plan.pricing.cost import PassCost
from moebatch.plan.problem import Problem
from moebatch.plan.replay.loads import job_loads
from moebatch.schedule.lanes import GPU
from moebatch.schedule.registry import traits_of
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import Policy

_HARDLY = 0.1
"""Of the time: lanes that wait for less have one among them that binds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A job under one policy on one machine."""

    tokens_per_s: float
    """Generated tokens of the job over its time; of a job without end, in the long run."""
    decode_tokens_per_s: float
    """Of a full batch that only decodes."""
    prefill_tokens_per_s: float
    """Prompt tokens of a full pass that only computes prompts."""
    layer_time_s: float
    """Of a mean layer of a mean pass."""
    lanes_s: Mapping[str, float]
    """Busy seconds of every lane during such a layer."""
    bottleneck: str
    """The lane that is busy longest."""
    launching_s: float = 0.0
    """Where that is the GPU's: seconds of it, during such a layer, that the host takes to prepare
    passes, to hand over tasks and to launch."""
    waiting_s: float = 0.0
    """During such a layer, in which even the lane that is busiest in its pass waits for others."""
    peak_bytes: Mapping[LevelName, int]
    capacity_bytes: Mapping[LevelName, int]
    busy_s: Mapping[str, float]
    """Busy seconds of every lane in all passes; of a job without end, in those looked at."""
    num_chosen: float | None = None
    """Experts that tokens choose in all passes, each once in a pass; of a job without end, in those
    looked at. None where a paper's model has no such figure."""
    num_passes: float | None
    """None for a job without a number of sequences, as is the next one."""
    job_time_s: float | None
    """Time of all passes, without loading and writing."""

    @property
    def lanes_wait(self) -> bool:
        """Whether they wait for each other, so that no lane alone says how long passes take."""
        return self.waiting_s > _HARDLY * self.layer_time_s

    @property
    def has_busy_lane(self) -> bool:
        """Whether one lane is busy nearly all the time."""
        return busiest_s(self.lanes_s) >= (1 - _HARDLY) * self.layer_time_s

    @property
    def binds(self) -> str:
        """What nothing is faster than: a lane, or the host, where the GPU mostly waits for it; not
        where no lane is always busy."""
        if self.lanes_wait:
            return "lanes that wait for each other"
        is_host = 2 * self.launching_s > self.lanes_s.get(self.bottleneck, 0.0)
        return "the host" if is_host else self.bottleneck


def predict(problem: Problem, policy: Policy) -> Prediction:
    """Goes through the job pass by pass and prices every pass."""
    total_s, waiting_s, num_passes, num_chosen, generated = 0.0, 0.0, 0.0, 0.0, 0.0
    lanes: dict[str, float] = {}
    costs = [*_costs(problem, policy)]
    for count, cost in costs:
        seconds = cost.seconds
        total_s += count * seconds
        waiting_s += count * (seconds - busiest_s(cost.lanes))
        num_passes += count
        num_chosen += count * cost.num_chosen
        generated += count * cost.load.logits_rows
        for lane, seconds in cost.lanes.items():
            lanes[lane] = lanes.get(lane, 0.0) + count * seconds
    layers = num_passes * problem.shape.num_layers
    footprints = problem.footprints(policy)
    endless = problem.workload.num_sequences is None
    return Prediction(
        tokens_per_s=generated / total_s,
        decode_tokens_per_s=_decode_rate(problem, policy),
        prefill_tokens_per_s=_prefill_rate(problem, policy),
        layer_time_s=total_s / layers,
        lanes_s={lane: seconds / layers for lane, seconds in lanes.items()},
        bottleneck=bottleneck(lanes),
        launching_s=_launching_s(problem, costs, lanes) / layers,
        waiting_s=waiting_s / layers,
        peak_bytes={level: footprint.total_bytes for level, footprint in footprints.items()},
        capacity_bytes={level: problem.capacity_bytes(level) for level in footprints},
        busy_s=lanes,
        num_chosen=num_chosen,
        num_passes=None if endless else num_passes,
        job_time_s=None if endless else total_s,
    )


def predicted_rate(problem: Problem, policy: Policy) -> float:
    """The `tokens_per_s` of a prediction, without the rest of it."""
    total_s = generated = 0.0
    for count, cost in _costs(problem, policy):
        total_s += count * cost.seconds
        generated += count * cost.load.logits_rows
    return generated / total_s


def _costs(problem: Problem, policy: Policy) -> Iterator[tuple[float, PassCost]]:
    """Those of all passes of a job, alike ones counted together."""
    for count, load in job_loads(problem.workload, policy):
        yield count, problem.cost_of(load, at_end(problem, policy, load))


def _launching_s(
    problem: Problem, costs: Sequence[tuple[float, PassCost]], lanes: Mapping[str, float]
) -> float:
    """Seconds of the GPU's lane in all passes that it would save if nobody had to ask for its work;
    none if another lane is the busiest."""
    if bottleneck(lanes) != GPU.name:
        return 0.0
    asked = replace(problem, hardware=problem.hardware.without_host)
    working_s = sum(
        count * asked.cost_of(cost.load, cost.policy).computing_s.get(GPU.name, 0.0)
        for count, cost in costs
    )
    return lanes[GPU.name] - working_s


def at_end(problem: Problem, policy: Policy, load: PassLoad) -> Policy:
    """The policy with as many experts more in main memory as have room in spare pages of the cache.

    Where experts stream through slots of main memory, the engine moves memory from pages to experts
    when no sequence waits for admission any more.
    """
    weights = policy.weights
    elsewhere = (
        problem.ladder.top == "vram" or policy.kv_cache.dram < 1 or traits_of(policy).is_paged
    )
    if elsewhere or not weights.disk or not load.spare_pages:
        return policy
    spare_bytes = cache_bytes(
        problem.memory.groups,
        problem.dtypes,
        policy,
        beyond=policy.num_kv_pages - load.spare_pages,
    )
    more = spare_bytes // slot_bytes(problem.shape, problem.dtypes)
    return problem.with_residents(policy, weights.dram * problem.num_experts + more)


def _decode_rate(problem: Problem, policy: Policy) -> float:
    load = PassLoad.decoding(policy.batch_size, problem.workload.decode_context)
    return policy.batch_size / problem.cost_of(load, policy).seconds


def _prefill_rate(problem: Problem, policy: Policy) -> float:
    """A static batch computes all of its prompts in one pass."""
    prompt = max(1.0, problem.workload.mean_prompt_tokens)
    is_static = policy.batching == "static"
    prompts = policy.batch_size if is_static else policy.tokens_per_pass / prompt
    load = PassLoad.of_prompts(prompts, prompt, encodes=problem.workload.is_encoded)
    return load.prompt_tokens / problem.cost_of(load, policy).seconds
