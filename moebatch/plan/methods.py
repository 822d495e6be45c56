"""From a question to an answer, by the method that is asked for."""

import datetime
from collections.abc import Iterator
from dataclasses import replace

import moebatch
from moebatch.errors import MoebatchError
from moebatch.plan.answer import Answer, answer_given, answer_milp
from moebatch.plan.as_json import prediction_json
from moebatch.plan.options import PlanOptions
from moebatch.plan.question import Question
from moebatch.plan.runnable import only_planned
from moebatch.spec.model.models import load_model
from moebatch.spec.policy.file import PolicyFile
from moebatch.spec.policy.policy import OpenPolicy


def answer_question(
    question: Question, options: PlanOptions, given: PolicyFile | None = None
) -> Answer:
    """The answer with the question's notes. Raises DoesNotFit and ConfigError."""
    answer = _answer(question, options, given)
    made_for = () if given is None else _made_for_another(question, given)
    return replace(
        answer,
        only_planned=tuple(only_planned(question.problem, answer.policy)),
        notes=(*question.notes, *made_for, *answer.notes, *_unmeasured(answer)),
    )


def answer_policy_file(answer: Answer) -> PolicyFile:
    """The answer as a file that `moebatch run --policy` takes."""
    workload = answer.problem.workload
    return PolicyFile(
        policy=OpenPolicy.of(answer.policy),
        title=answer.title,
        source=f"moebatch {moebatch.__version__} plan, {datetime.date.today()}",
        model=answer.model,
        hardware=answer.problem.hardware.name,
        workload=workload,
        prediction=prediction_json(answer.prediction),
    )


def _made_for_another(question: Question, given: PolicyFile) -> Iterator[str]:
    """A model or a machine that a policy file names, and that is not the one asked about."""
    if given.model and not _is_same_model(question, given.model):
        yield f"the policy was made for {given.model}, not for {question.model}"
    machine = question.problem.hardware.name
    if given.hardware and given.hardware != machine:
        yield f"the policy was made for {given.hardware}, not for {machine}"


def _unmeasured(answer: Answer) -> Iterator[str]:
    """What stands in for a rate of decoding that the profile lacks, where one is counted."""
    if answer.method == "paper":
        return
    problem, stored = answer.problem, answer.problem.dtypes.stored
    level = problem.ladder.experts_at(answer.policy)
    processor = problem.hardware.levels[level].processor
    if processor is None or not problem.dtypes.converts or stored.is_tiled:
        return
    for each, _ in stored.shares:
        if each.measured_as not in processor.decoding:
            yield (
                f"decoding of {each} on {level} has not been measured: the plan takes it for "
                "one more reading of the weights"
            )


def _is_same_model(question: Question, name: str) -> bool:
    if name.casefold() == question.model.casefold():
        return True
    try:
        return load_model(name).shape == question.problem.shape
    except MoebatchError:  # a name that says nothing here
        return False


def _answer(question: Question, options: PlanOptions, given: PolicyFile | None) -> Answer:
    problem, model = question.problem, question.model
    if given is not None:
        policy = given.policy.resolve(problem.workload, num_experts=problem.num_experts)
        return answer_given(problem, model, policy, source=given.path, schedule=options.schedule)
    if options.paper:
        from moebatch.plan.papers.moe_lightning import answer_paper

        return answer_paper(problem, model)
    if options.method == "klotski":
        from moebatch.plan.papers.klotski import answer_klotski

        return answer_klotski(problem, model)
    supposed = replace(problem, schedule=options.schedule or problem.schedule)
    return answer_milp(supposed, model, question.wishes)
