"""What makes a schedule out of a generator: a decorator that says what the schedule is like.

    @schedule(moves="experts", runs="pass", foresees="likely")
    def mine(layer: Layer) -> Schedule:
        yield from attend_and_route(layer)
        for e in (yield Arrivals(layer.step)):
            yield expert(layer.step, e)
        yield combine(layer.step)

Planner, simulator and executor read the traits; none of them knows a schedule's name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Literal, TypeVar, get_args

from moebatch.quoting import not_one_of, shown
from moebatch.schedule.request import (
    CancelPrefetch,
    NextPass,
    Prefetch,
    PrefetchToDram,
    Request,
    Schedule,
    Sweep,
)
from moebatch.schedule.setup import Setup
from moebatch.schedule.steps.attention import Attention
from moebatch.schedule.steps.kv import KvTraffic
from moebatch.schedule.task import Task, dense

Moves = Literal["experts", "pages", "block"]
Runs = Literal["pass", "batch"]
Foresees = Literal["nothing", "likely", "pre-gate", "layer"]
Attends = Literal["cpu", "gpu"]
_WORDS: Mapping[str, tuple[str | None, ...]] = {
    "moves": get_args(Moves),
    "runs": get_args(Runs),
    "foresees": get_args(Foresees),
    "attention": (*get_args(Attends), None),
}
"""What may be said of each trait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What a schedule is like, as far as costs, memory and the engine depend on it."""

    moves: Moves = "experts"
    """How weights come to the level that computes: expert by expert into slots; a layer in pages
    into one half of a buffer (CGOPipe); a layer in one piece, on a lane of its own (FlexGen)."""
    runs: Runs = "batch"
    """An expert runs once over all tokens of a pass, or once for every micro-batch."""
    foresees: Foresees = "layer"
    """What comes before a layer's own gate has chosen: nothing; the experts that a predictor says;
    those that the gate of an earlier layer has chosen; all of the layer, chosen or not."""
    attention: Attends | None = None
    """Where decoding sequences attend on a machine with a GPU; None leaves it to the policy."""
    shares_weights: bool = True
    """Micro-batches walk through a layer together, so that its weights come once a pass."""

    def __post_init__(self) -> None:
        """Raises ValueError for a word that is none of those that there are."""
        for field, allowed in _WORDS.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} {not_one_of(allowed, getattr(self, field))}")

    @property
    def is_paged(self) -> bool:
        """Weights come layer by layer into two halves of a buffer, so nothing is kept in slots."""
        return self.moves != "experts"

    @property
    def holds_layer(self) -> bool:
        """Experts that any micro-batch chose stay until all of them have been through the layer."""
        return self.runs == "batch" and self.moves == "experts" and self.foresees != "layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One layer of one pass, as its schedule sees it."""

    setup: Setup
    sweep: Sweep
    step: int
    """Layers are counted on from pass to pass."""
    kv: KvTraffic
    micro_batches: Sequence[int]
    """Numbers of those that go through it together: all of the pass, unless each walks alone."""

    def attention(self) -> Attention:
        """Their attention, wherever it is computed."""
        return Attention(self.sweep, self.micro_batches, self.step, self.kv)

    def prefetch_kv(self) -> Iterator[Task]:
        """Brings up keys and values that the next layer needs first, if the pass has one."""
        if self.setup.layer(self.step) + 1 < self.setup.num_layers:
            yield from self.kv.up(self.sweep, self.step + 1, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedSchedule:
    """A schedule under its name; called with a `Setup`, it begins a job."""

    name: str
    traits: Traits
    begin: Callable[[Setup], Schedule]

    def __call__(self, setup: Setup) -> Schedule:
        return self.begin(setup)


Given = TypeVar("Given")
LayerSchedule = Callable[[Layer], Schedule]
JobSchedule = Callable[[Setup], Schedule]


def schedule(
    *,
    moves: Moves = "experts",
    runs: Runs,
    foresees: Foresees,
    attention: Attends | None = None,
) -> Callable[[LayerSchedule], NamedSchedule]:
    """Makes a schedule of a generator over one layer with experts. `walk` does the rest: passes,
    layers without experts, and what is foreseen before a layer begins."""
    traits = Traits(moves=moves, runs=runs, foresees=foresees, attention=attention)
    return lambda of_layer: _named(of_layer, traits, lambda setup: walk(setup, traits, of_layer))


def job_schedule(traits: Traits) -> Callable[[JobSchedule], NamedSchedule]:
    """Makes a schedule of a generator over a whole job, where layers are not walked through one
    after the other. Raises TypeError for anything but traits."""
    if not isinstance(traits, Traits):
        raise TypeError(f"job_schedule takes Traits(…), got {shown(traits)}")
    return lambda of_job: _named(of_job, traits, lambda setup: begun(of_job, setup))


def begun(written: Callable[[Given], Schedule], given: Given) -> Schedule:
    """A schedule that has been written, for a layer or for a job. Raises TypeError where it is no
    generator."""
    made = written(given)
    if not isinstance(made, GeneratorType):
        raise TypeError(f"a schedule yields tasks; this one returned {shown(made)}")
    return made


def _named(written: Callable[..., Schedule], traits: Traits, begin: JobSchedule) -> NamedSchedule:
    return NamedSchedule(name=written.__name__, traits=traits, begin=begin)


def walk(setup: Setup, traits: Traits, of_layer: LayerSchedule) -> Schedule:
    """All layers of all passes, one after the other, but for those that a pass leaves out."""
    kv, first = KvTraffic(setup), 0
    yield from _before_first_pass(setup, traits)
    while sweep := (yield NextPass()):
        in_pass = setup.in_pass(sweep)
        steps = in_pass.steps(first)
        yield from leave_out(in_pass, first)
        if traits.foresees == "likely":  # the tokens of the pass are known now
            yield from prefetch_likely(in_pass, steps[0] - 1)
        for step in steps:
            if traits.foresees == "layer":
                yield from prefetch_layer(in_pass, step)
            layer = Layer(
                setup=in_pass, sweep=sweep, step=step, kv=kv, micro_batches=sweep.micro_batches
            )
            yield from begun(of_layer if setup.is_moe(step) else dense_layer, layer)
        first += setup.num_layers


def leave_out(setup: Setup, first: int) -> Iterator[Request]:
    """Experts of layers that a walk leaves out are not wanted."""
    for step in range(first, first + setup.num_skipped):
        if setup.is_moe(step):
            yield CancelPrefetch(step)


def prefetch_to_dram(setup: Setup, step: int) -> Iterator[Request]:
    """While one step computes and the next one goes up from main memory, experts of those that
    follow come from disk (Klotski); nothing where no experts live on disk below a GPU."""
    for later in setup.next_moe(step, setup.window):
        yield PrefetchToDram(later)


def prefetch_likely(setup: Setup, step: int) -> Iterator[Request]:
    """The K likeliest experts of each of the steps that follow, the nearest first."""
    for later in setup.next_moe(step, setup.depth):
        yield Prefetch(later, setup.num_hot)
    yield from prefetch_to_dram(setup, step)


def prefetch_layer(setup: Setup, step: int) -> Iterator[Request]:
    """All experts of the next step that has any, behind those of this one for which there was no
    slot so far: they would only be driven out again."""
    if step >= 0 and setup.is_moe(step):
        yield Prefetch(step)
    for later in setup.next_moe(step, 1):
        yield Prefetch(later)
    yield from prefetch_to_dram(setup, step)


def dense_layer(layer: Layer) -> Schedule:
    """A layer without experts."""
    attention = layer.attention()
    for k in layer.micro_batches:
        yield from attention.of(k)
    yield dense(layer.step)


def _before_first_pass(setup: Setup, traits: Traits) -> Iterator[Request]:
    if traits.foresees == "likely":
        yield from prefetch_likely(setup, -1)
    elif traits.foresees == "layer":
        yield from prefetch_layer(setup, -1)
