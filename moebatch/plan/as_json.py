"""An answer as plain data with stable keys, for programs."""

from dataclasses import asdict
from math import isfinite
from typing import Any

from moebatch.plan.answer import Answer
from moebatch.plan.expert_choice import ExpertChoice
from moebatch.plan.prediction import Prediction
from moebatch.plan.roofs import PolicyRoofs, policy_roofs
from moebatch.spec.policy.policy import Policy


def answer_json(answer: Answer) -> dict[str, Any]:
    """Everything that the screen shows. Units stand in the names; what is not known is null."""
    problem, sink_window = answer.problem, answer.problem.shape.attention.sink_window
    recurrence = problem.shape.recurrence
    return {
        "model": answer.model,
        "hardware": problem.hardware.name,
        "workload": {
            "num_sequences": problem.workload.num_sequences,
            "mean_prompt_tokens": problem.workload.mean_prompt_tokens,
            "mean_new_tokens": problem.workload.mean_new_tokens,
            "max_total_tokens": problem.workload.max_total_tokens,
        },
        "weights": str(problem.dtypes.stored),
        "kv_cache": problem.shape.attention.cache_dtype or "full",
        "state_cache": recurrence.state_dtype if recurrence else None,
        "attention": None if sink_window is None else asdict(sink_window),
        "method": answer.method,
        "solver": answer.solver,
        "policy": policy_json(answer.policy),
        "prediction": prediction_json(answer.prediction),
        "experts": None if answer.experts is None else _experts(answer.experts),
        "turning_points": [
            _turning_points(roofs) for roofs in policy_roofs(problem, answer.policy)
        ],
        "improvements": [
            {
                "change": better.change.words,
                "what_if": better.change.what_if,
                "option": better.change.option,
                "speedup": better.speedup,
            }
            for better in answer.improvements
        ],
        "only_planned": list(answer.only_planned),
        "notes": list(answer.notes),
    }


def _experts(choice: ExpertChoice) -> dict[str, Any]:
    return {
        "gain": choice.gain,
        "layers_ahead": choice.depth,
        "alternatives": [
            {
                "predictor": one.policy.predictor,
                "cache": one.policy.cache,
                "cache_sizes": list(one.policy.cache_sizes),
                "job_time_s": one.seconds,
                "loads_per_pass": one.num_loads,
                "ready": one.ready,
                "is_chosen": one is choice.chosen,
            }
            for one in choice.alternatives
        ],
    }


def policy_json(policy: Policy) -> dict[str, Any]:
    """A policy by the names of its fields."""
    derived = {"num_micro_batches": policy.num_micro_batches}
    return {**asdict(policy), **derived, "cache_sizes": list(policy.cache_sizes)}


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """A prediction by the names of its fields, for a mean layer rather than all passes."""
    fields, passes = asdict(prediction), prediction.num_passes
    del fields["busy_s"], fields["num_chosen"]
    return {**fields, "num_passes": None if passes is None else round(passes)}


def _turning_points(roofs: PolicyRoofs) -> dict[str, Any]:
    roofline = roofs.roofline
    figures = {
        "p1_flop_per_byte": roofs.p1,
        "p1_tokens": roofs.p1_tokens,
        "p2_flop_per_byte": roofs.p2,
        "p2_tokens": roofs.p2_tokens,
    }
    finite = {name: figure if isfinite(figure) else None for name, figure in figures.items()}
    return {"upper": roofline.level_i, "lower": roofline.level_j, **finite}
