"""How a text is read: a job of it, an engine with requests whose answers do not count, and a policy
for reading prompts to their end.

The planner trades prompts against answers in the same pass; here there are prompts only, and what
counts is how many tokens share one walk of the weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from moebatch.calibration.texts import TokenSequence
from moebatch.engine.build import build_engine
from moebatch.engine.engine import Engine
from moebatch.engine.spec import EngineSpec
from moebatch.errors import CheckpointError, DoesNotFit
from moebatch.job.opened import OpenedJob
from moebatch.job.planning import job_problem
from moebatch.layout.footprint import slot_bytes
from moebatch.measure.process_limits import detect_machine
from moebatch.measure.saved import machine_profile
from moebatch.model.native import loader
from moebatch.plan.problem import Problem
from moebatch.plan.search.candidates import FEWEST_SLOTS
from moebatch.plan.search.planner import best_policy
from moebatch.spec.job import InputSection, Job, ModelSection, OutputSection, ResourcesSection
from moebatch.spec.policy.policy import STREAMING_SLOTS, Placement, Policy, pages_of
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from moebatch.spec.workload import Workload

_READING = Sampling(max_tokens=1, temperature=0.0)
_MOST_PASS_TOKENS = 8192
_LEAST_PASS_TOKENS = 64


def text_job(model: Path, text: Path, *, output: Path, dram_bytes: int | None) -> OpenedJob:
    """A job of a model, a text and a limit of memory, for everything that is asked of jobs. Raises
    CheckpointError for a model that encodes prompts: a text is none."""
    opened = OpenedJob(
        Job(
            model=ModelSection(path=model),
            input=InputSection(path=text),
            output=OutputSection(path=output),
            resources=ResourcesSection(dram=dram_bytes),
        )
    )
    if opened.files.shape.encoder is not None:
        name = opened.files.shape.architecture
        message = f"{name} encodes prompts, and what its gates choose is not learnt from texts"
        raise CheckpointError(f"{model}: {message}; run it as it is")
    return opened


def text_engine(
    opened: OpenedJob, sequences: Sequence[TokenSequence], *, held_bytes: int = 0
) -> EngineSpec:
    """An engine with a policy within the job's budget, of which the reader of the passes holds
    `held_bytes`; for sequences with their one new token. Raises DoesNotFit."""
    lengths = list(map(len, sequences))
    workload = Workload(
        num_sequences=len(lengths),
        mean_prompt_tokens=sum(lengths) / len(lengths),
        mean_new_tokens=1.0,
        max_total_tokens=max(lengths) + 1,
    )
    profile, _ = machine_profile()  # its capacities count, not its rates
    problem = job_problem(opened.job, opened.files, workload, profile.hardware())
    held = problem.program_bytes["dram"] + held_bytes
    problem = replace(problem, program_bytes={"dram": held}, kv_on_disk=False)
    try:
        policy = reading_policy(problem)
    except DoesNotFit as error:
        raise DoesNotFit(f"{error}\nFor a text resources.dram is --dram.") from None
    return EngineSpec(files=opened.files, policy=policy, max_tokens=workload.max_total_tokens)


@contextmanager
def reading_engine(
    spec: EngineSpec, opened: OpenedJob, log: Callable[[str], None]
) -> Iterator[Engine]:
    """The engine, on all cores; its model is gone from memory behind the block."""
    loader.log_compiling(log)
    torch.set_num_threads(detect_machine().num_cores)
    reader = opened.reader
    built = build_engine(
        spec,
        decoder=reader.tokenizer,
        end_tokens=frozenset(),
        job_seed=0,
        grammars=reader.grammars,
    )
    with closing(built), torch.inference_mode():
        yield built.engine


def read_through(
    engine: Engine, sequences: Sequence[TokenSequence], numbers: range, *, folder: Path
) -> None:
    """Reads some sequences of a text, by number. Raises CheckpointError, with the `folder` of the
    model, for weights that are no numbers."""
    requests = (
        Request(
            index=number,
            custom_id=str(number),
            prompt_tokens=sequences[number],
            sampling=_READING,
        )
        for number in numbers
    )
    for outcome in engine.run(requests):
        if outcome.error is not None:
            raise CheckpointError(f"{folder}: {outcome.error.message}")


def reading_policy(problem: Problem) -> Policy:
    """The largest passes that fit, of whole sequences if possible, and as many resident experts as
    then still fit; what the planner knows where none of these does.

    Raises DoesNotFit.
    """
    for policy in _policies(problem):
        if problem.fits(policy):
            return _with_residents(problem, policy)
    return best_policy(problem).policy


def _policies(problem: Problem) -> Iterator[Policy]:
    """Ever smaller ones."""
    workload, pass_tokens = problem.workload, _MOST_PASS_TOKENS
    mean_pages = pages_of(round(workload.mean_total_tokens))
    while pass_tokens >= _LEAST_PASS_TOKENS:
        seats = max(1, int(pass_tokens / workload.mean_prompt_tokens))
        seats = min(seats, workload.num_sequences or seats)
        streaming = Policy(
            batch_size=seats,
            micro_batch_size=seats,
            tokens_per_pass=pass_tokens,
            num_slots=STREAMING_SLOTS,
            num_kv_pages=max(seats * mean_pages, pages_of(workload.max_total_tokens)),
            weights=Placement(disk=1.0),
        )
        yield replace(streaming, num_slots=0, weights=Placement(dram=1.0))
        yield streaming
        yield replace(streaming, num_slots=FEWEST_SLOTS)
        pass_tokens //= 2


def _with_residents(problem: Problem, policy: Policy) -> Policy:
    """The same with experts that stay in main memory, as far as there is room."""
    if not policy.num_slots:
        return policy
    used = problem.footprints(policy)["dram"].total_bytes
    room = slot_bytes(problem.shape, problem.dtypes)
    # One that streams is left: with none the policy would have been another.
    num_resident = (problem.capacity_bytes("dram") - used) // room
    return problem.with_residents(policy, min(num_resident, problem.num_experts - 1))
