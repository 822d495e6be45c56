"""How surely a model expects a text, measured by the engine that runs jobs, within their memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moebatch.calibration.reading_policy import reading_policy
from moebatch.calibration.texts import SEQUENCE_TOKENS, TokenSequence, read_sequences
from moebatch.checkpoint.model_files import ModelFiles
from moebatch.engine.build import build_engine
from moebatch.engine.spec import EngineSpec
from moebatch.engine.text_losses import TextLosses
from moebatch.errors import CheckpointError, DoesNotFit, Fault, InputError
from moebatch.job.opened import OpenedJob
from moebatch.job.planning import job_problem
from moebatch.measure.saved import machine_profile
from moebatch.model.native import loader
from moebatch.plan.machine import detect_machine
from moebatch.predict.predictor import RoutingObserver
from moebatch.spec.job import InputSection, Job, ModelSection, OutputSection, ResourcesSection
from moebatch.spec.policy import Policy
from moebatch.spec.request import Request
from moebatch.spec.sampling import Sampling
from moebatch.spec.workload import Workload

_READING = Sampling(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOrder:
    """A text, and how it is read."""

    path: Path
    """Plain text, or what a job reads its prompts from."""
    num_tokens: int
    """So much of it is read at most."""
    dram_bytes: int | None
    """Most main memory; None is all that is free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """What a model makes of a text."""

    value: float
    """exp of the mean loss of a token that has others before it."""
    num_tokens: int
    """Those tokens."""


def measure_perplexity(
    model: Path,
    text: TextOrder,
    log: Callable[[str], None],
    observer: RoutingObserver | None = None,
) -> Perplexity:
    """Reads a text with a model; `observer` learns what its gates choose.

    Raises MoebatchError where text, model or memory are not fit for it.
    """
    job = Job(
        model=ModelSection(path=model),
        input=InputSection(path=text.path),
        output=OutputSection(path=text.path),
        resources=ResourcesSection(dram=text.dram_bytes),
    )
    opened = OpenedJob(job)
    files, reader = opened.files, opened.reader
    longest = min(SEQUENCE_TOKENS, files.shape.max_positions - 1)
    sequences = read_sequences(
        text.path, reader, num_tokens=text.num_tokens, sequence_tokens=longest
    )
    if max(map(len, sequences)) < 2:
        raise InputError([Fault(file=str(text.path), message="has no two tokens in a row")])
    policy, max_tokens = _policy(job, files, sequences)
    loader.log_compiling(log)
    torch.set_num_threads(detect_machine().num_cores)
    losses = TextLosses(sequences)
    spec = EngineSpec(
        files=files, policy=policy, max_tokens=max_tokens, observer=observer, losses=losses
    )
    built = build_engine(spec, decoder=reader.tokenizer, end_tokens=frozenset(), job_seed=0)
    with closing(built), torch.inference_mode():
        for outcome in built.engine.run(_requests(sequences)):
            if outcome.error is not None:
                raise CheckpointError(f"{model}: {outcome.error.message}")
    return Perplexity(value=losses.perplexity, num_tokens=losses.num_tokens)


def _policy(job: Job, files: ModelFiles, sequences: Sequence[TokenSequence]) -> tuple[Policy, int]:
    """One within the budget, and the longest sequence with its one new token."""
    lengths = list(map(len, sequences))
    workload = Workload(
        num_sequences=len(lengths),
        mean_prompt_tokens=sum(lengths) / len(lengths),
        mean_new_tokens=1.0,
        max_total_tokens=max(lengths) + 1,
    )
    profile, _ = machine_profile()  # its capacities count, not its rates
    problem = job_problem(job, files, workload, profile.hardware())
    try:
        policy = reading_policy(replace(problem, kv_on_disk=False))
    except DoesNotFit as error:
        raise DoesNotFit(f"{error}\nFor a text resources.dram is --dram.") from None
    return policy, workload.max_total_tokens


def _requests(sequences: Sequence[TokenSequence]) -> Iterator[Request]:
    for number, tokens in enumerate(sequences):
        yield Request(index=number, custom_id=str(number), prompt_tokens=tokens, sampling=_READING)
