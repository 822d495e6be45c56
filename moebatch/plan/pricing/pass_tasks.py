"""A pass as the sum of its tasks: what a schedule launches, each at its price."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil

from moebatch.layout.lanes import LaneSeconds, takes_turns_by_micro_batch
from moebatch.layout.load import PassLoad
from moebatch.layout.routing import chosen_experts, distinct_experts, layers_of, routed
from moebatch.layout.scratch import prompt_rows
from moebatch.once import cached_property, once
from moebatch.plan.pricing.prices import LaneTime, Prices
from moebatch.plan.pricing.task_prices import KV_KINDS, TaskPrices
from moebatch.schedule.drivers.emission import Launched, computes_together, launched
from moebatch.schedule.lanes import CPU, DEVICES, DOWN, GPU, PROCESSORS, UP
from moebatch.schedule.steps.kv import NUM_WINDOWS
from moebatch.schedule.steps.kv_route import Place
from moebatch.schedule.task import Kind
from moebatch.spec.machine.hardware import LevelName
from moebatch.spec.policy.policy import Policy

Arithmetic = dict[Hashable, LaneSeconds]
"""Seconds in which processors compute, by all that they depend on beside the prices."""

ROUNDING = 1e-6
"""Of numbers of micro-batches."""


@dataclass(frozen=True, kw_only=True)  # no slots: what follows from them is worked out once
class PassTasks:
    """Tasks of a mean pass under a policy, with as many micro-batches and experts as that has,
    fractions allowed."""

    prices: Prices
    load: PassLoad
    policy: Policy
    known: Arithmetic = field(default_factory=dict, compare=False)
    """Remembers `computing_s` of many passes."""

    @property
    def key(self) -> Hashable:
        """All that `computing` depends on beside the prices: many policies share it."""
        policy, price = self.policy, self._price
        return (
            self.load,
            policy.micro_batch_size,
            policy.schedule,
            policy.attention_on_gpu,
            price.fresh,
            price.most_together,
        )

    # --- whatever lives where -------------------------------------------------------------------

    def computing(self) -> LaneSeconds:
        """Seconds of lanes with tasks that do not depend on what lives where."""
        seconds = dict[str, float]()
        for number, batch in self._sizes:
            for lane, time_s in self._steps(batch):
                seconds[lane] = seconds.get(lane, 0.0) + number * time_s
        for lane, time_s in (
            (self._lane(Kind.EXPERT), self.experts_s),
            (self._lane(Kind.COMBINE), self._combining_s),
        ):
            seconds[lane] = seconds.get(lane, 0.0) + time_s
        return seconds

    @property
    def _combining_s(self) -> float:
        """Outputs of experts added up in all layers, and the head."""
        return self._num_moe * self._price.combine_s() + self.head_s

    @cached_property
    def head_s(self) -> float:
        """The head, and what lies between the pass and the next."""
        return self._price.head_s(self.load.logits_rows)

    def _computing(self, batch: PassLoad) -> Iterator[LaneTime]:
        layers, kinds = len(self._layers), self._launched(batch, self.prices.top, of_cache=False)
        for kind, count in kinds.items():
            seconds = self._price.of_batch(kind, batch, self._share)
            if seconds is not None:
                yield self._lane(kind), layers * count * seconds
        # Gates, and what layers without experts have in their place.
        yield self._lane(Kind.GATE), self._price.gates_s(batch, self._layers)
        if Kind.LOAD in kinds and Kind.OUT not in kinds:  # `post` projects
            yield self._lane(Kind.POST), layers * self._price.post_out_s(batch)

    @cached_property
    def computing_s(self) -> LaneSeconds:
        """The same by lane."""
        return once(self.known, self.key, self.computing)

    @cached_property
    def outside_s(self) -> float:
        """All that is computed but the experts, one after the other."""
        computing = (self.computing_s.get(lane, 0.0) for lane in PROCESSORS)
        return sum(computing) - self.experts_s

    @cached_property
    def beside_s(self) -> float:
        """The same where a CPU attends beside a GPU: both are busy side by side but for one of the
        micro-batches that decode, which goes down to the one and up again. Prompts come behind."""
        traits = self._price.traits
        if not (self._beside and self.load.decode_sequences and traits.shares_weights):
            return self.outside_s
        number, batch = self._sizes[0]
        steps, cpu_s = self._steps(batch), self.computing_s.get(CPU.name, 0.0)
        gpu_s = number * sum([seconds for lane, seconds in steps if lane == GPU.name])
        between_s = sum([seconds for lane, seconds in steps if lane in (UP.name, DOWN.name)])
        at_once_s = (1 - 1 / number) * min(cpu_s, gpu_s)
        return self.outside_s - at_once_s + between_s

    @property
    def expert_s(self) -> float:
        """One expert, on those tokens of the pass that choose it."""
        return self.experts_s / max(1.0, chosen_experts(self.prices.shape, self.load))

    @cached_property
    def experts_s(self) -> float:
        """All experts: once over all tokens of the pass, or once for every micro-batch."""
        return self._experts_s()

    def _experts_s(self, fresh: float | None = None) -> float:
        if self._price.traits.runs == "pass":
            return self._expert_layers_s(self.load, fresh=fresh)
        whole = self._whole
        return sum([number * self._expert_layers_s(batch, fresh=fresh) for number, batch in whole])

    @property
    def gaps_s(self) -> tuple[float, float]:
        """Longest time in which a CPU gives no slot back, in every layer: from the last expert of
        one layer that arrives to the first of the next, both computed, with the rest of a layer and
        the experts that stay between them; and the same when the head comes between, too."""
        shape, head_s = self.prices.shape, self.head_s
        outside_s = (self.outside_s - head_s) / len(self._layers)
        of_layer_s = self.experts_s / self._num_moe
        each_s = of_layer_s / max(1.0, chosen_experts(shape, self.load) / self._num_moe)
        gap_s = outside_s + self.policy.weights.dram * of_layer_s + 2 * each_s
        return gap_s, gap_s + head_s

    # --- what moves -----------------------------------------------------------------------------

    def moving(self) -> Iterator[LaneTime]:
        """Lane and seconds of each kind of task that brings or stores what lives elsewhere, but for
        experts."""
        if self.policy.streamed_layers:
            yield self._lane(Kind.LAYER_UP), self._walks * self._layers_up_s
        layers = self.prices.shape.num_keeping_layers
        for home, share in self._price.kv_homes:
            for number, batch in self._sizes:
                for kind, seconds in self._cache_kinds_s(home, batch).items():
                    yield self._lane(kind), share * number * (layers * seconds)

    @cached_property
    def cache_waits_s(self) -> float | None:
        """Seconds in which attention waits for keys and values, where experts are computed when all
        micro-batches have attended. Micro-batches of prompts wait for none while a CPU attends to
        others. None where nothing waits so."""
        traits = self._price.traits
        if traits.is_paged or not traits.shares_weights:
            return None
        place = "dram" if self._beside else self.prices.top
        elsewhere = [(home, share) for home, share in self._price.kv_homes if home != place]
        if not elsewhere:
            return 0.0
        # Wherever they come from: waits are affine in the shares.
        experts_s = self._experts_s(fresh=0.0) / len(self._layers)
        waits_s = sum([share * self._cache_waits_s(home, experts_s) for home, share in elsewhere])
        return self.prices.shape.num_keeping_layers * waits_s

    def _cache_waits_s(self, home: LevelName, experts_s: float) -> float:
        """The same in a layer whose cache lives at `home`: two windows hold the caches of two
        micro-batches, so they move while others attend, that of the first one while experts are
        computed. A window goes to the next micro-batch when what is new has been stored."""
        waits_s, windows_s, odd_s, count = 0.0, 0.0, 0.0, 0.0
        for number, batch in self._attending:
            moving, attends_s = self._cache_s(home, batch).values(), self._attends_s(batch)
            first, moving_s = float(not count), max(moving, default=0.0)
            turn_s = (sum(moving) + attends_s) / NUM_WINDOWS
            again = max(0.0, number - NUM_WINDOWS)
            waits_s += first * max(0.0, moving_s - experts_s)
            waits_s += (number - first - again) * max(0.0, moving_s - attends_s)
            waits_s += again * max(0.0, max(moving_s, turn_s) - attends_s)
            windows_s, count = windows_s + number * turn_s, count + number
            odd_s = max(odd_s, turn_s)
        # The window of the last of an odd number is that of the first one in the next layer.
        is_odd = ceil(count - ROUNDING) % NUM_WINDOWS
        computing_s = experts_s + self.outside_s / len(self._layers)
        return max(waits_s, windows_s + is_odd * odd_s - computing_s)

    @property
    def _attending(self) -> Sequence[tuple[float, PassLoad]]:
        """Micro-batches that attend in the place where those that decode do."""
        return [
            (number, batch)
            for number, batch in self._sizes
            if not (self._beside and batch.prompt_tokens)
        ]

    def _attends_s(self, batch: PassLoad) -> float:
        """Such a one in a layer, in seconds."""
        kind = Kind.ATTN if self._beside else Kind.ATTEND
        return self.prices.once(
            (kind, *self._alike, batch),
            lambda: self._price.of_batch(kind, batch, self._share) or 0.0,
        )

    def _cache_s(self, home: LevelName, batch: PassLoad) -> dict[str, float]:
        """Seconds of devices that move keys and values of a micro-batch in a layer."""
        seconds = dict[str, float]()
        for kind, each_s in self._cache_kinds_s(home, batch).items():
            device = DEVICES[self._lane(kind)]
            seconds[device] = seconds.get(device, 0.0) + each_s
        return seconds

    def _cache_kinds_s(self, home: LevelName, batch: PassLoad) -> Mapping[Kind, float]:
        """The same by kinds of tasks, where its cache lives at `home`."""
        kinds = self._launched(batch, home, of_cache=True)
        if not kinds:
            return {}

        def seconds() -> Mapping[Kind, float]:
            price = self._price
            return {
                kind: count * (price.of_batch(kind, batch) or 0.0) for kind, count in kinds.items()
            }

        return self.prices.once((home, *self._alike, batch), seconds)

    @property
    def load_s(self) -> float:
        """Seconds until an expert has come from below, on all the way together."""
        return sum(seconds for _, seconds in self._weights(1.0))

    def _weights(self, num_loads: float | None) -> Iterator[LaneTime]:
        weights = self.policy.weights
        below = 1 - weights.on(self.prices.top)
        loads = below * self._moved_experts if num_loads is None else num_loads
        if self.prices.top == "dram":
            yield self._lane(Kind.CHUNK), self._price.fetch_s(loads)
            return
        on_disk = loads * weights.disk / below if below else 0.0
        yield self._lane(Kind.FETCH), self._price.fetch_s(on_disk)
        match self._price.traits.moves:
            case "experts":
                yield self._lane(Kind.CHUNK), self._price.chunk_s(loads)
            case "pages":
                yield self._lane(Kind.PAGE), self._price.up_s(loads)
                yield self._lane(Kind.STAGE), self._price.stage_s(loads)
            case "block":
                yield self._lane(Kind.BLOCK), self._price.chunk_s(loads)

    @cached_property
    def _moved_experts(self) -> float:
        """Experts that a pass would move if none were where they are computed. Some schedules bring
        whole layers, chosen or not; some do so again for each micro-batch."""
        traits = self._price.traits
        if traits.foresees != "layer":
            return chosen_experts(self.prices.shape, self.load)
        return self._walks * self.prices.shape.num_experts * self._num_moe

    @property
    def _layers_up_s(self) -> float:
        """Weights outside experts of all layers that have them below, once."""
        count, shape, price = self.policy.streamed_layers, self.prices.shape, self._price
        return self.prices.once(
            ("layers up", count), lambda: price.layers_up_s(shape.streamed(count))
        )

    @property
    def _walks(self) -> float:
        """Times that a pass goes through the layers."""
        if self._price.traits.shares_weights:
            return 1.0
        return max(1.0, self._num_batches)

    # --- micro-batches --------------------------------------------------------------------------

    def _steps(self, batch: PassLoad) -> Sequence[LaneTime]:
        """Lane and seconds of what is computed of a micro-batch but its experts, in all layers."""
        key = "steps", *self._alike, batch
        return self.prices.once(key, lambda: [*self._computing(batch)])

    @cached_property
    def _alike(self) -> tuple[Hashable, ...]:
        """What decides over tasks of a micro-batch beside what it has to do."""
        policy = self.policy
        return policy.micro_batch_size, policy.schedule, policy.batching, self._beside, self._share

    @cached_property
    def _sizes(self) -> list[tuple[float, PassLoad]]:
        """Micro-batches of sequences that decode, then those of prompts."""
        load, policy, sizes = self.load, self.policy, list[tuple[PassLoad, int]]()
        if load.decode_sequences:
            decoding = PassLoad(load.decode_sequences, load.decode_positions)
            sizes.append((decoding, policy.micro_batch_size))
        if load.prompt_tokens:
            sizes.append((load.in_stack(encodes=True), prompt_rows(policy, self.prices.top)))
        numbers = [(max(1.0, part.tokens / size), part) for part, size in sizes]
        return [(number, part.divided(number)) for number, part in numbers]

    @property
    def _whole(self) -> Iterator[tuple[int, PassLoad]]:
        """The same, full ones and the rest of either kind apart: experts of the rest are about as
        many as those of a full one."""
        for number, batch in self._sizes:
            full = int(number + ROUNDING)
            yield full, batch
            if number > full + ROUNDING:
                yield 1, batch.times(number - full)

    @cached_property
    def _num_batches(self) -> int:
        """Micro-batches that there are, rests and all."""
        return sum(ceil(number - ROUNDING) for number, _ in self._sizes)

    @cached_property
    def decoding_chain_s(self) -> float:
        """Seconds in which a micro-batch that decodes goes through all layers, where the CPU
        attends to it and the GPU computes the rest: each waits for what the other one has made of
        it, so no pass ends earlier. 0 elsewhere."""
        if not self.load.decode_sequences or not takes_turns_by_micro_batch(self.policy):
            return 0.0
        return self._alone_s(self._sizes[0][1])

    def _alone_s(self, batch: PassLoad) -> float:
        """A micro-batch through all layers, one step after the other."""
        steps_s = sum([seconds for _, seconds in self._steps(batch)])
        return steps_s + self._expert_layers_s(batch)

    def _launched(self, batch: PassLoad, home: LevelName, *, of_cache: bool) -> Launched:
        """Tasks of a micro-batch in a layer whose keys and values live at `home`."""
        kinds = _launched(
            self.policy.schedule,
            self.prices.top,
            home,
            attends_on_cpu=self._beside,
            of_cache=of_cache,
        )
        return kinds[batch.prompt_tokens > 0]

    @cached_property
    def _beside(self) -> bool:
        return self._price.attends_beside

    def _expert_layers_s(self, load: PassLoad, *, fresh: float | None = None) -> float:
        """Experts of all layers once, over the tokens of a load; `fresh` is the share of them that
        come from below, if not that of the policy."""
        fresh = self._price.fresh if fresh is None else fresh
        most_together = self._price.most_together
        tokens = load.decode_sequences, load.prompt_tokens
        key = "experts", tokens, fresh, self.policy.schedule, most_together
        return self.prices.once(key, lambda: self._of_all_layers_s(load, fresh))

    def _of_all_layers_s(self, load: PassLoad, fresh: float) -> float:
        shape, seconds = self.prices.shape, 0.0
        for layers, tokens in routed(shape, load):
            active = distinct_experts(shape, tokens)
            if active:
                mean_rows = tokens * shape.computed_per_token / active
                for share, rows in self.prices.launches.kinds(mean_rows):
                    each_s = self._price.expert_s(rows, fresh=fresh, is_mean=True)
                    layer_s = active * each_s + self._launching_s(active, rows)
                    seconds += layers * share * layer_s
        return seconds

    def _launching_s(self, active: float, rows: float) -> float:
        """Of so many experts of a layer, over so many tokens each. Where they are computed together
        as far as they are there, groups are as large as they get: those that come one by one are
        launched while the GPU waits for the link anyway."""
        together = active
        if not self._price.traits.is_paged:
            groups = computes_together(self.policy.schedule, self.prices.top)
            together = min(active, self._price.most_together if groups else 1)
        whole = max(1, round(together))
        return active / whole * self._price.launching_s([rows] * whole)

    @cached_property
    def _layers(self) -> range:
        """Those that the pass goes through."""
        return layers_of(self.prices.shape, self.load)

    @cached_property
    def _num_moe(self) -> int:
        """Of them with experts."""
        stacks = self.prices.dense.stacks
        return sum([one.num_moe for one in stacks if one.layers.start in self._layers])

    @cached_property
    def _share(self) -> float:
        """Of all layers."""
        return len(self._layers) / self.prices.shape.num_layers

    def _lane(self, kind: Kind) -> str:
        return self.prices.lanes[kind]

    @cached_property
    def _price(self) -> TaskPrices:
        policy = self.policy
        return self.prices.once(policy, lambda: TaskPrices(prices=self.prices, policy=policy))


@cache
def _launched(
    name: str, top: Place, home: LevelName, *, attends_on_cpu: bool, of_cache: bool
) -> tuple[Launched, ...]:
    """Those tasks that move keys and values, or all others."""
    return tuple(
        {kind: count for kind, count in kinds.items() if (kind in KV_KINDS) == of_cache}
        for kinds in launched(name, top, home, attends_on_cpu=attends_on_cpu)
    )
