"""A planning question asked in words: names of a machine and a model, and lengths."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from moebatch.layout.footprint import Dtypes
from moebatch.plan.expert_choice import Wishes
from moebatch.plan.options import PlanOptions
from moebatch.plan.pricing.compute_dtypes import without_emulation
from moebatch.plan.problem import Problem
from moebatch.spec.machine.hardware import Basis
from moebatch.spec.machine.profile import HardwareProfile
from moebatch.spec.model.models import ModelEntry, load_model
from moebatch.spec.model.named_formats import named_format
from moebatch.spec.model.shape import ModelShape

_MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A problem with what its reader should know of it."""

    problem: Problem
    model: str
    notes: tuple[str, ...] = ()
    wishes: Wishes = field(default_factory=Wishes)
    """What its job says of experts."""

    def noted(self, notes: Iterable[str]) -> "Question":
        """The same question with more to know."""
        return replace(self, notes=(*notes, *self.notes))


def stated_question(profile: HardwareProfile, options: PlanOptions) -> Question:
    """A question about a machine and a model that need not be here.

    Raises ConfigError for names, files and changes that are wrong.
    """
    assert options.model is not None, "checked before"
    entry = load_model(options.model)
    shape = entry.shape.cached_in(options.kv_cache or "full", options.state_cache or "full")
    shape = shape.seen_through(options.sink_window)
    profile = changed_profile(profile, options.figures)
    hardware, workload = profile.hardware(options.basis), options.stated_workload()
    stated = stored_as(stated_dtypes(entry.shape), options.stored, shape)
    dtypes, notes = without_emulation(stated, hardware)
    return Question(
        problem=Problem(shape=shape, dtypes=dtypes, hardware=hardware, workload=workload).as_cached,
        model=entry.name,
        notes=(*notes, *_published(entry, options), *figure_notes(profile, options.basis)),
    )


def _published(entry: ModelEntry, options: PlanOptions) -> Iterator[str]:
    """Formats that could be asked for, where none is."""
    if entry.also_published and options.stored is None:
        found = entry.also_published.items()
        named = ", ".join(f"{name} ({checkpoint})" for name, checkpoint in found)
        yield f"also published as {named}: --weights plans for such a checkpoint"


def changed_profile(profile: HardwareProfile, what_if: Iterable[str]) -> HardwareProfile:
    """The profile with every ``NAME=FIGURE`` in place."""
    for change in what_if:
        profile = profile.with_change(change)
    return profile


def stated_dtypes(shape: ModelShape) -> Dtypes:
    """Weights as the configuration says they are stored, computed as they are declared."""
    return Dtypes(stored=shape.expert_format, compute=shape.dtype)


def stored_as(dtypes: Dtypes, name: str | None, shape: ModelShape) -> Dtypes:
    """The same with all experts in the format of that name, if there is one. Raises ConfigError."""
    if name is None:
        return dtypes
    return Dtypes(stored=named_format(name, shape), compute=dtypes.compute)


def figure_notes(profile: HardwareProfile, basis: Basis) -> list[str]:
    """What stands in for figures that have not been measured."""
    assumed = profile.assumed(basis) if basis == "achieved" else ()
    if not assumed:
        return []
    more = f" and {len(assumed) - _MOST_NAMED} more" if len(assumed) > _MOST_NAMED else ""
    named = ", ".join(assumed[:_MOST_NAMED])
    return [f"data sheet figures, for want of measured ones: {named}{more}"]
