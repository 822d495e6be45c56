"""How long a pass takes where its lanes wait for each other: each of these is a bound, which the
busiest lane may exceed.

What a layer waits for depends on what its schedule is like: experts that nobody foresaw, slots that
are taken while others should come, weights that go up in one piece, a pinned buffer that is filled
when its page has gone up, windows that take the cache of one micro-batch at a time.
"""

from collections.abc import Iterator, Sequence
from math import floor
from typing import NamedTuple

from moebatch.layout.lanes import LaneSeconds, pass_seconds
from moebatch.layout.load import PassLoad
from moebatch.layout.routing import chosen_experts, distinct_experts
from moebatch.once import cached_property
from moebatch.plan.pricing.pass_tasks import ROUNDING, PassTasks
from moebatch.schedule.drivers.emission import asks_at_once, comes_in_one_piece
from moebatch.schedule.lanes import CPU
from moebatch.schedule.steps.attention import LOOK_AHEAD
from moebatch.schedule.steps.kv import NUM_WINDOWS
from moebatch.schedule.steps.kv_route import FROM_ATTENTION, TO_ATTENTION
from moebatch.schedule.task import Kind


class _Ways(NamedTuple):
    """Seconds in which keys and values of a micro-batch move in a layer."""

    to_s: float
    """To attention, one hop after the other."""
    from_s: float
    longest_s: float
    """Of the device that is busiest with it."""


class PassWaits(PassTasks):
    """Lengths of a pass with what it waits for, all layers together."""

    @property
    def num_loads(self) -> float | None:
        """Experts that come in a pass, where that is known; None where all come that some token
        chooses."""
        return None

    @cached_property
    def bringing_s(self) -> LaneSeconds:
        """Seconds of lanes that bring experts, each once in a layer."""
        return dict(self._weights(self.num_loads))

    def waiting_s(self, lanes: LaneSeconds) -> float:
        """The longest of them, where lanes are busy for so long."""
        if not self._sizes:
            return 0.0
        if self._price.traits.is_paged:
            in_pages_s = max(self._ends_s, self._prompts_s, self._pages_s, self._windows_s)
            return max(in_pages_s, self._blocks_s(lanes))
        return max(
            self._slots_s, self._asked_late_s(lanes), self._one_by_one_s, self._whole_layers_s
        )

    # --- experts in slots -----------------------------------------------------------------------

    @property
    def _slots_s(self) -> float:
        """Experts of the next layer come ahead as far as slots are left beside those of this one;
        the link has nothing to do while these are held, and more are to come than it had slots
        for. Zero where nothing comes before it is asked for."""
        coming_s = self._coming_s
        if not coming_s or self._asks_late or self.num_loads is not None:
            return 0.0
        if not self._price.traits.shares_weights:  # `_whole_layers_s` says it
            return 0.0
        once_s = coming_s / max(1.0, self._rounds)
        length_s = max(coming_s, once_s + self._held_s - self._share_ahead * once_s)
        # Main memory says so itself, with what is given back, unless experts come again.
        if self.prices.top == "vram" or self._num_again:
            before_s = self._attending_s + self._staying_s
            length_s = max(length_s, coming_s + before_s - self._share_left * once_s)
        return length_s

    @property
    def _staying_s(self) -> float:
        """Seconds of experts that stay where they are computed, which come first, where each is
        computed once: no slot is given back meanwhile."""
        runs = self._price.traits.runs
        return self.experts_s * self.policy.weights.vram if runs == "pass" else 0.0

    @property
    def _held_s(self) -> float:
        """Seconds in which all experts of a layer hold their slots: those that are computed for
        every micro-batch until the last one, and where whole layers come also while it attends."""
        traits, experts_s = self._price.traits, self.experts_s
        if traits.runs == "pass":
            return experts_s / self._num_groups if traits.foresees == "layer" else 0.0
        if traits.foresees == "layer":  # one more that comes again changes nothing
            but = int(self._num_again > 0)
            return self._share_whole(but) * (self._attending_s + experts_s)
        held_s = max(0.0, 1 - 2 / self._num_batches) * experts_s
        if not asks_at_once(self.policy.schedule):
            held_s += self._attending_s
        return self._share_whole() * held_s

    def _share_whole(self, but: int = 0) -> float:
        """Of layers, those whose experts that come all have slots, but for so many: in others, they
        leave to make room."""
        return min(1.0, max(0.0, self.policy.num_slots + 1 + but - self._coming_in_layer))

    def _asked_late_s(self, lanes: LaneSeconds) -> float:
        """Where experts are asked for late, they come when the first micro-batch has chosen, or in
        their turn, of which one computes while the next one comes."""
        if not self._asks_late or not self._coming_s:
            return 0.0
        if self._price.traits.runs == "pass":
            return self._asked_at_once_s(lanes)
        attending_s, experts_s = self._attending_s, self.experts_s
        last_s = experts_s / max(1.0, self._num_streamed)
        again_s = self._coming_s / self._rounds + (1 - 1 / self._num_batches) * experts_s
        return attending_s + max(experts_s, again_s, self._coming_s + last_s / self._num_batches)

    def _asked_at_once_s(self, lanes: LaneSeconds) -> float:
        """Experts come beside those micro-batches that attend after the first of their layer, and
        beside the cache of these, until slots are full; then when those that stay have been
        computed."""
        others, coming_s, attending_s = 1 - 1 / self._num_batches, self._coming_s, self._attending_s
        lane = self._lane(Kind.CHUNK)
        cache_s = others * (lanes.get(lane, 0.0) - self.bringing_s.get(lane, 0.0))
        share = others * self._num_moe / len(self._layers)
        beside_s = share * (attending_s - self._combining_s)
        left_s = (1 - min(1.0, self._share_in_slots)) * coming_s
        arrived_s = max(coming_s + cache_s, beside_s + self._staying_s + left_s)
        last_s = self.experts_s / max(1.0, self._num_streamed)
        return attending_s + max(self.experts_s, arrived_s + last_s - beside_s)

    @property
    def _one_by_one_s(self) -> float:
        """Of micro-batches that walk alone, the cache of the next one does not come while one is
        computed."""
        if self._price.traits.shares_weights:
            return 0.0
        return sum(self.computing_s.values()) + self._alone_waits_s

    @cached_property
    def _alone_waits_s(self) -> float:
        """Seconds in which such micro-batches wait for it."""
        if self._price.traits.shares_weights:
            return 0.0
        experts_s = self.experts_s / (self._num_batches * len(self._layers))
        moved_s = sum(
            share * number * (max(0.0, ways.to_s - experts_s) + ways.from_s)
            for share, number, _, ways in self._caches(self._sizes)
        )
        return self.prices.shape.num_keeping_layers * moved_s

    @property
    def _whole_layers_s(self) -> float:
        """Micro-batches that walk alone, each behind the whole experts of a layer, of which some
        layers bring one more than others; between passes, the head."""
        traits, coming = self._price.traits, self._coming_in_layer
        if traits.shares_weights or traits.foresees != "layer" or not coming:
            return 0.0
        few = floor(coming + ROUNDING)
        layers = [(few, 1 - (coming - few)), (few + 1, coming - few)]
        return self.head_s + self._num_moe * sum(
            number * share * of_layers * self._whole_layer_s(batch, ways, count)
            for number, batch in self._whole
            for share, ways in self._ways(batch)
            for count, of_layers in layers
            if of_layers > ROUNDING
        )

    def _whole_layer_s(self, batch: PassLoad, ways: _Ways, count: int) -> float:
        """One of them in a layer into which so many experts come. When the experts of a layer are
        launched, as many of the next are asked for as there are slots beside them; all that have
        slots come before the first is computed; others that are chosen, when one has been."""
        shape, num_moe, num_slots = self.prices.shape, self._num_moe, self.policy.num_slots
        load_s = self._coming_s / (self._rounds * self._num_streamed)
        experts_s = self._expert_layers_s(batch) / num_moe
        attending_s = (self._alone_s(batch) + self._combining_s - self.head_s) / num_moe - experts_s
        if num_slots >= count:
            attending_s += max(0.0, ways.to_s - experts_s) + ways.from_s
            ahead_s = min(count, num_slots - count) * load_s
            return max(count * load_s, count * load_s - ahead_s + attending_s + experts_s)
        last_s = experts_s / shape.num_experts
        attending_s += max(0.0, ways.to_s - last_s) + ways.from_s
        chosen = chosen_experts(shape, batch) / (num_moe * shape.num_experts)
        left_s = (count - num_slots) * chosen * load_s
        return max(attending_s, (num_slots - 1) * load_s) + load_s + max(experts_s, left_s + last_s)

    @property
    def _attending_s(self) -> float:
        """All that is computed but experts, with what attention waits for."""
        return self.beside_s + (self.cache_waits_s or 0.0)

    @cached_property
    def _coming_s(self) -> float:
        """Seconds of the link that brings experts to where they are computed; of the disk before it
        as well where they come one after the other, each when it is its turn."""
        once = self.bringing_s
        up = Kind.BLOCK if self._price.traits.moves == "block" else Kind.CHUNK
        up_s = once.get(self._lane(up), 0.0)
        fetched_s = once.get(self._lane(Kind.FETCH), 0.0) if self.prices.top == "vram" else 0.0
        if self._price.traits.moves == "block":
            return max(up_s, fetched_s)
        return self._rounds * (up_s + (fetched_s if self._in_turn else 0.0))

    @property
    def _in_turn(self) -> bool:
        """Whether an expert on disk comes all the way only when it is needed."""
        return self._rounds > 1 or (self._price.traits.runs == "batch" and self._asks_late)

    @property
    def _asks_late(self) -> bool:
        """Whether experts are asked for when they are needed: nothing is foreseen, or what was has
        to leave again for those whose turn it is."""
        if self._price.traits.foresees == "nothing":
            return True
        return self._num_again > 0 and not asks_at_once(self.policy.schedule)

    @property
    def again(self) -> LaneSeconds:
        """Seconds of lanes that bring experts once more, by lane: where there are fewer slots than
        a layer has experts, each micro-batch brings most of them again. Less than none where not
        all of a whole layer come."""
        more = self._rounds - 1
        return {lane: more * seconds for lane, seconds in self.bringing_s.items()} if more else {}

    @cached_property
    def _rounds(self) -> float:
        """Times that experts come in a layer, in the mean of those that may."""
        again, of_layer = self._num_again, self._coming_in_layer
        is_whole = self._price.traits.foresees == "layer"
        if not again:
            return self._share_brought if is_whole else 1.0
        # Those that the first micro-batch has asked for leave in their order, but for one.
        first = of_layer if is_whole else self._of_batch - 1
        brought = first + (self._num_batches - 1) * again
        return 1 + (1 - self._share_whole()) * max(0.0, brought / of_layer - 1)

    @property
    def _share_brought(self) -> float:
        """Of the experts of whole layers, those that have slots, and others that some token
        chooses."""
        share, shape, load = min(1.0, self._share_in_slots), self.prices.shape, self.load
        if share == 1 or not share:
            return 1.0
        below = 1 - self.policy.weights.on(self.prices.top)
        of_pass = below * chosen_experts(shape, load) / self._num_moe
        chosen = of_pass if self._price.traits.shares_weights else self._of_batch
        return share + (1 - share) * chosen / self._coming_in_layer

    @cached_property
    def _num_again(self) -> float:
        """Experts that a micro-batch brings behind others of its layer, where there are fewer slots
        than a layer has experts: those that are in no slot. In one of these an expert is computed,
        another one makes room for the next that has been read, if it is chosen, too. And the link
        brings experts for as long as a processor is behind, in place of those that come next."""
        traits, num_slots = self._price.traits, self.policy.num_slots
        if traits.moves != "experts" or traits.runs == "pass" or not traits.shares_weights:
            return 0.0
        if not num_slots or self._share_in_slots >= 1 or self._num_batches <= 1:
            return 0.0
        of_layer, of_batch, weights = self._coming_in_layer, self._of_batch, self.policy.weights
        on_disk = weights.disk / (1 - weights.vram) if self.prices.top == "vram" else 0.0
        num_kept = max(0.0, num_slots - 1 - (1 - on_disk) * of_batch / of_layer)
        missing = of_batch * (1 - num_kept / of_layer)
        coming_s = self._num_batches * self.bringing_s[self._lane(Kind.CHUNK)]
        return min(of_batch, max(missing, of_layer * self.experts_s / coming_s))

    @cached_property
    def _of_batch(self) -> float:
        """Experts of a layer that come from below and that a mean micro-batch chooses."""
        shape = self.prices.shape
        chosen = [number * distinct_experts(shape, batch.tokens) for number, batch in self._sizes]
        below = 1 - self.policy.weights.on(self.prices.top)
        of_batch = below * sum(chosen) / sum([number for number, _ in self._sizes])
        return min(self._coming_in_layer, of_batch)

    @property
    def _num_streamed(self) -> float:
        """Experts of a pass that come from below, each once."""
        return (1 - self.policy.weights.on(self.prices.top)) * self._moved_experts

    @property
    def _coming_in_layer(self) -> float:
        """The same in a layer, each time that micro-batches go through it."""
        return self._num_streamed / (self._walks * self._num_moe)

    @property
    def _share_in_slots(self) -> float:
        """Of these, those for which there are slots."""
        of_layer = self._coming_in_layer
        return self.policy.num_slots / of_layer if of_layer else 1.0

    @property
    def _share_left(self) -> float:
        """Of the same, for which there are when experts of the layer before have come again: behind
        each the link has time for a part of one that was foreseen, which has to leave for others
        as soon as it has a slot."""
        if self._price.traits.foresees == "layer":
            return self._share_in_slots
        again = self._num_again / self.prices.num_chunks
        return max(0.0, self._share_in_slots - again / self._coming_in_layer)

    @property
    def _share_ahead(self) -> float:
        """Of the same, for which there are while others of a layer have theirs."""
        return min(1.0, max(0.0, self._share_in_slots - 1))

    @property
    def _num_groups(self) -> float:
        """In which experts of a layer are computed."""
        return max(1.0, self.prices.shape.num_experts / self._price.most_together)

    # --- weights in pages or in one piece -------------------------------------------------------

    @property
    def _pages_s(self) -> float:
        """Where the weights of a layer come in one page, its pinned buffer is filled when the page
        before has gone up; and where several micro-batches attend on the CPU, that page goes up
        behind the results of the last one, and holds up those of the next layer."""
        page_s, stage_s = self._page_s
        is_whole = comes_in_one_piece(self.policy.schedule)
        if not is_whole and self._num_batches > 1:
            return 0.0
        behind_s, chain_s = 0.0, self.decoding_chain_s
        number = self._sizes[0][0]
        if is_whole and chain_s and number > 2:
            cpu_s = self.computing_s.get(CPU.name, 0.0)
            behind_s = chain_s + (1 - 3 / number) * max(cpu_s, number * chain_s - cpu_s)
        # Pages of layers behind one without experts go up when micro-batches have been through it.
        between = min(1.0, len(self._layers) / self._num_moe - 1)
        return page_s + max(stage_s, behind_s, between * chain_s)

    @property
    def _ends_s(self) -> float:
        """Where a CPU attends beside a GPU: a micro-batch through all layers, or that CPU, which
        has nothing to do while a pass ends on the GPU and the next one begins."""
        chain_s = self.decoding_chain_s
        if not chain_s:
            return 0.0
        cpu_s = self.computing_s.get(CPU.name, 0.0)
        layer_s = (chain_s - cpu_s / self._sizes[0][0]) / len(self._layers)
        return self.head_s + max(chain_s, cpu_s + layer_s)

    @property
    def _prompts_s(self) -> float:
        """Prompts behind micro-batches that the CPU attends to, one after the other; it attends to
        as many as it looks ahead meanwhile, and to others when the first of these go on."""
        chain_s, number = self.decoding_chain_s, self._sizes[0][0]
        prompts = [(number, batch) for number, batch in self._sizes if batch.prompt_tokens]
        if not (chain_s and prompts):
            return 0.0
        prompts_s, others_s = sum(count * self._alone_s(batch) for count, batch in prompts), 0.0
        if number > LOOK_AHEAD:
            attends_s = self.computing_s.get(CPU.name, 0.0) / number
            others_s = (number - LOOK_AHEAD) * attends_s + 2 * (chain_s - attends_s)
        return prompts_s + others_s + self.head_s

    @property
    def _page_s(self) -> tuple[float, float]:
        """Seconds in which pages go up, and into pinned buffers before; of these the first hop has
        what is read of a disk beside it."""
        page_s, stage_s, read_s = (
            self.bringing_s.get(self._lane(kind), 0.0)
            for kind in (Kind.PAGE, Kind.STAGE, Kind.FETCH)
        )
        if self.prices.ladder.copies_through_buffers(self.policy):
            return page_s, max(stage_s, read_s)
        return max(page_s, read_s), stage_s

    def _blocks_s(self, lanes: LaneSeconds) -> float:
        """All waits for all after each micro-batch, and weights come up beside the first one, whose
        cache nothing hides, in layers that have others with experts behind them."""
        if self._price.traits.moves != "block":
            return 0.0
        block_s, first = self._coming_s, self._sizes[0][1]
        first_s, layers = self._alone_s(first), self.prices.shape.num_keeping_layers
        ways = self._caches(self._sizes[:1])
        cache_s = layers * sum(share * way.to_s for share, _, _, way in ways)
        beside = dict(lanes)
        for lane, seconds in self.bringing_s.items():
            beside[lane] = max(0.0, beside.get(lane, 0.0) - seconds)
        work_s = pass_seconds(beside, self.policy)
        others_s = max(0.0, work_s - max(first_s, cache_s))
        if self.prices.top == "dram" and cache_s:  # one lane reads both
            return block_s + first_s + cache_s + others_s
        first_s += cache_s
        beside_s = self._num_moe / len(self._layers) * first_s
        return max(block_s, beside_s) + first_s - beside_s + others_s

    @property
    def _windows_s(self) -> float:
        """A micro-batch attends in the window of its cache, which is filled again when all of it
        has been stored: two of them for all that attend in one place. And in the layers whose cache
        lives elsewhere nothing hides it but what is computed there."""
        waits_s, layers = 0.0, self.prices.shape.num_keeping_layers
        busy_s = max(*self.computing_s.values(), *self.bringing_s.values(), 0.0)
        for share, number, batch, ways in self._caches(self._attending):
            attends_s = self._attends_s(batch)
            rest_s = 0.0 if self._beside else self._alone_s(batch) / len(self._layers) - attends_s
            from_s = max(ways.from_s, rest_s) if number == 1 else ways.from_s
            in_turns_s = (ways.to_s + attends_s + from_s) / min(NUM_WINDOWS, number)
            needs_s = number * max(ways.longest_s, in_turns_s)
            waits_s += share * max(0.0, needs_s - number / self._num_batches * busy_s / layers)
        return busy_s + layers * waits_s if waits_s else 0.0

    # --- micro-batches --------------------------------------------------------------------------

    def _caches(
        self, sizes: Sequence[tuple[float, PassLoad]]
    ) -> Iterator[tuple[float, float, PassLoad, _Ways]]:
        """Share of the layers, number of micro-batches of a size and what they have to do, and how
        long their cache moves in one such layer; where it does."""
        for number, batch in sizes:
            for share, ways in self._ways(batch):
                if ways.longest_s:
                    yield share, number, batch, ways

    def _ways(self, batch: PassLoad) -> Iterator[tuple[float, _Ways]]:
        """Shares of the layers, and how long the cache of a micro-batch moves in one of them."""
        for home, share in self._price.kv_homes:
            seconds = self._cache_kinds_s(home, batch)
            to_s, from_s = (
                sum([seconds.get(kind, 0.0) for kind in kinds])
                for kinds in (TO_ATTENTION, FROM_ATTENTION)
            )
            longest_s = max(self._cache_s(home, batch).values(), default=0.0)
            yield share, _Ways(to_s, from_s, longest_s)
