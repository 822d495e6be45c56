"""From a question to an answer, by the method that is asked for."""

import datetime
from dataclasses import replace

import moebatch
from moebatch.plan.answer import Answer, answer_given, answer_milp
from moebatch.plan.as_json import prediction_json
from moebatch.plan.fitting import fitted, policy_for, slot_notes
from moebatch.plan.options import PlanOptions
from moebatch.plan.prediction import predict
from moebatch.plan.question import Question
from moebatch.spec.policy import OpenPolicy
from moebatch.spec.policy_file import PolicyFile


def answer_question(
    question: Question, options: PlanOptions, given: PolicyFile | None = None
) -> Answer:
    """The answer with the question's notes. Raises DoesNotFit and ConfigError."""
    answer = _answer(question, options, given)
    if options.schedule is not None:
        answer = _with_schedule(answer, options.schedule)
    return replace(answer, notes=(*question.notes, *answer.notes))


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


def _with_schedule(answer: Answer, schedule: str) -> Answer:
    """The same policy under another schedule, with fewer experts where they are computed if that
    needs the room. Raises DoesNotFit."""
    problem = answer.problem
    policy = fitted(problem, policy_for(answer.policy, schedule, problem))
    return replace(
        answer,
        policy=policy,
        prediction=predict(problem, policy),
        improvements=(),
        notes=(*answer.notes, *slot_notes(problem, policy)),
    )


def _answer(question: Question, options: PlanOptions, given: PolicyFile | None) -> Answer:
    problem, model = question.problem, question.model
    if given is not None:
        policy = given.resolve(problem.workload, num_experts=problem.num_experts)
        return answer_given(problem, model, policy, source=given.path)
    if options.paper:
        from moebatch.plan.papers.answer_paper import answer_paper

        return answer_paper(problem, model)
    if options.method == "klotski":
        from moebatch.plan.papers.answer_klotski import answer_klotski

        return answer_klotski(problem, model)
    return answer_milp(problem, model, question.wishes)
