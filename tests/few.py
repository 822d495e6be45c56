"""What `make test` runs of much that is alike; `make test-all` runs it all.

A matrix is a test with cases that are alike but for their parameters. Marked with ``few``, it keeps
as many of them as together have every value of every parameter, and the others are exhaustive::

    @pytest.mark.few                                 # every schedule once, and every family
    @pytest.mark.few(name=("klotski", "cgopipe"))    # of schedules, these have to be there
    @pytest.mark.few(2)                              # two cases, with as many values as can be
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf

import pytest
from hypothesis import HealthCheck, settings

Case = Mapping[str, object]
"""Values by the names of parameters."""


# Timing never decides a test: neither how long an example takes, nor how long it takes to make one.
_TIMELESS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
_MANY = _TIMELESS.max_examples
_SHARE = 5
settings.register_profile("all", _TIMELESS)
settings.register_profile(
    "few", _TIMELESS, max_examples=_MANY // _SHARE, derandomize=True, database=None
)


def choose(*, runs_all: bool) -> None:
    """Properties get new examples each time when everything is run. Else they get a part of them,
    the same every time."""
    settings.load_profile("all" if runs_all else "few")


def runs_all() -> bool:
    """Whether everything is run."""
    return settings().max_examples == _MANY


def examples(most: int, *borne: HealthCheck) -> settings:
    """For a property whose examples take long: so many, and a part of them in `make test`."""
    return settings(
        max_examples=most if runs_all() else max(most // _SHARE, 2),
        suppress_health_check=[*settings().suppress_health_check, *borne],
    )


def mark_the_others(items: Iterable[pytest.Item]) -> None:
    """Marks the cases of matrices that are too many for `make test`."""
    matrices: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("few"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in matrices.values():
        mark = cases[0].get_closest_marker("few")
        assert mark is not None
        kept = few([case.callspec.params for case in cases], mark.kwargs, *mark.args)
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker("exhaustive")


def few(
    cases: Sequence[Case], wanted: Mapping[str, Iterable[object]], most: float = inf
) -> set[int]:
    """Places of at most so many cases that together have every value of every parameter, or of one
    that is in `wanted` only the values there; values take turns in meeting each other."""
    needed = [
        {(name, repr(value)) for name, value in case.items() if value in wanted.get(name, (value,))}
        for case in cases
    ]
    left = set().union(*needed)
    used: Counter[tuple[str, str]] = Counter()
    kept: set[int] = set()
    while left and len(kept) < most:
        number = max(
            range(len(cases)),
            key=lambda i: (len(needed[i] & left), len(needed[i]), -sum(used[v] for v in needed[i])),
        )
        kept.add(number)
        used.update(needed[number])
        left -= needed[number]
    return kept
