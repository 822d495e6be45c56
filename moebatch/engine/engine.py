"""Requests in, outcomes out: admits sequences, runs passes, samples, and notices ends."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from moebatch.engine.batcher import Batcher, Slice
from moebatch.engine.passes.passes import LogitsBlock, Passes
from moebatch.engine.progress.course import Course
from moebatch.engine.sampling.constraint import Constraint, Grammars
from moebatch.engine.sampling.sampler import Sampled, Sampler
from moebatch.engine.sequence import Sequence
from moebatch.engine.statistics import EngineStatistics
from moebatch.engine.tail import Tail
from moebatch.engine.text import AnswerText, TextDecoder, end_reason
from moebatch.errors import CheckpointError, OutOfMemory
from moebatch.quoting import reason
from moebatch.spec.policy.policy import PAGE_TOKENS
from moebatch.spec.request import Begun, Choice, End, Outcome, Request, RowError
from moebatch.store.memory import is_out_of_memory, return_freed_memory
from moebatch.units import count_of

MAX_BROKEN_REQUESTS = 100
"""More requests with logits that are no numbers, and the run is given up: it is the weights."""

MOST_SHRINKS = 3
"""Even smaller passes would take a night for what a smaller plan does in an hour."""


class Engine:
    """Runs requests to their end, as many at once as the policy allows."""

    def __init__(
        self,
        *,
        passes: Passes,
        sampler: Sampler,
        decoder: TextDecoder,
        grammars: Grammars | None = None,
        tail: Tail | None = None,
    ) -> None:
        self.statistics = EngineStatistics(num_layers=passes.num_layers)
        self.course = Course()
        self._passes = passes
        self._cache, self._policy = passes.cache, passes.policy
        self._sampler = sampler
        self._decoder = decoder
        self._grammars = grammars
        self._tail = tail
        self._num_broken = 0
        self._interruption: BaseException | None = None
        self._batcher = self._new_batcher(())
        """Of the run in work."""
        self._in_work: dict[int, list[Sequence]] = {}
        self._done: deque[Outcome] = deque()

    def run(self, requests: Iterable[Request]) -> Iterator[Outcome]:
        """Yields the outcome of every request, in the order in which they end.

        Requests are taken one by one, as places fall free. A request that can never be computed
        within the cache is an outcome with an error, as is one whose logits are not finite.
        """
        self._batcher = self._new_batcher(requests)
        self.course.begin()
        while True:
            with _between_passes():
                slices = self._batcher.next_pass()
            if slices and self._run_or_shrink(slices):
                with _between_passes():
                    self._after_pass(slices)
            return_freed_memory()
            while self._done:
                yield self._done.popleft()
            if not slices:
                return

    def interrupt(self, error: BaseException) -> None:
        """Ends the run within a task or so: `run` raises `error`, unless all requests have ended by
        then. Any thread may say so."""
        self._interruption = error
        self._passes.interrupt(error)

    @property
    def num_ended(self) -> int:
        """Steps of work that have ended so far; grows while anything moves."""
        return self._passes.num_ended

    def doing(self) -> str:
        """What is being done, in words, for when nothing moves."""
        return self._passes.doing()

    def unfinished(self) -> Iterator[tuple[Request, tuple[Begun, ...]]]:
        """Requests that `run` has not yielded and that have tokens, with what there is of each
        choice."""
        for sequences in self._in_work.values():
            if any(sequence.output_tokens for sequence in sequences):
                yield sequences[0].request, tuple(map(_begun, sequences))
        for outcome in self._done:  # ended in the pass that was given up
            if outcome.error is None:
                yield outcome.request, tuple(map(_all_of, outcome.choices))

    def _new_batcher(self, requests: Iterable[Request]) -> Batcher:
        encodes = self._passes.encodes
        return Batcher(self._sequences(requests), self._cache, self._policy, encodes=encodes)

    def _run_or_shrink(self, slices: list[Slice]) -> bool:
        """Runs a pass; if the system refuses memory, prepares for smaller ones and says False."""
        try:
            self._run_pass(slices)
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if self.statistics.num_shrunk == MOST_SHRINKS or not self._batcher.shrink():
                size = count_of(sum(piece.num_tokens for piece in slices), "token")
                raise _out_of_memory(f"even for a pass of {size}", error) from error
        with _between_passes():
            self._passes.give_up()  # the schedule begins anew, and looks ahead
        self._batcher.repeat(slices)
        self.statistics.num_shrunk += 1
        return False

    def _run_pass(self, slices: list[Slice]) -> None:
        for block in self._passes.run(slices, self._count_layer):
            with self._passes.computing():
                tokens = self._sampler.sample(block.logits_RV, block.sequences)
            with _between_passes():
                self._take_in(block, tokens)

    def _take_in(self, block: LogitsBlock, tokens: list[Sampled]) -> None:
        for sequence, row, sampled in zip(block.sequences, block.rows, tokens, strict=True):
            if sequence.request.index not in self._in_work:
                continue  # another choice of the request has failed
            if sampled.fault:
                self._fail(sequence.request, _beyond_grammar(sampled.fault))
            elif sampled.finite:
                self._append(sequence, sampled)
            else:
                self._fail_broken(sequence.request, block.broken.place_of(row))

    def _sequences(self, requests: Iterable[Request]) -> Iterator[Sequence]:
        for request in requests:
            longest = len(request.prompt_tokens) + request.sampling.max_tokens
            if not self._cache.holds(longest):
                self._done.append(Outcome(request=request, error=self._too_long(longest)))
                continue
            fits = not request.num_encoded or longest <= self._policy.tokens_per_pass
            assert fits, "a prompt is encoded in one pass"
            sequences = [self._sequence(request, choice) for choice in range(request.sampling.n)]
            self._in_work[request.index] = sequences
            self._finish_if_complete(request)
            yield from (sequence for sequence in sequences if sequence.result is None)

    def _sequence(self, request: Request, choice: int) -> Sequence:
        """With what an earlier run has left; that may be all of it, where other choices were still
        in work."""
        answer, grammar = AnswerText(self._decoder, request.sampling), request.sampling.grammar
        sequence = Sequence(request, choice, answer)
        if grammar is not None:
            assert self._grammars is not None, "there is nothing that could hold answers to it"
            sequence.constraint = Constraint(self._grammars.matching(grammar), request)
        if request.begun and request.begun[choice].tokens:
            sequence.output_tokens.extend(request.begun[choice].tokens)
            sequence.logprobs.extend(request.begun[choice].logprobs)
            end = self._end_of(sequence)
            if end is not None:
                sequence.result = self._choice(sequence, end)
        return sequence

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        """Appends the new token, and retires the sequence if that is its last."""
        sequence.output_tokens.append(sampled.token)
        if sampled.logprob is not None:
            sequence.logprobs.append(sampled.logprob)
        self.statistics.generated_tokens += 1
        end = self._end_of(sequence)
        if end is not None:
            self._batcher.retire(sequence)
            self.course.ended(sequence)
            sequence.result = self._choice(sequence, end)
            self._finish_if_complete(sequence.request)

    def _end_of(self, sequence: Sequence) -> End | None:
        sampling, tokens = sequence.request.sampling, sequence.output_tokens
        end = end_reason(sampling, tokens, self._sampler.end_tokens)
        if end is not None and end.by_token:
            return end
        stop = sequence.answer.push(tokens)
        return End("stop", stop) if stop is not None else end

    def _choice(self, sequence: Sequence, end: End) -> Choice:
        wants_logprobs = sequence.request.sampling.logprobs is not None
        return Choice(
            index=sequence.choice,
            tokens=tuple(sequence.output_tokens),
            text=sequence.answer.finish(sequence.output_tokens, end),
            finish_reason=end.finish_reason,
            stop_reason=end.stop_reason,
            logprobs=tuple(sequence.logprobs) if wants_logprobs else None,
        )

    def _finish_if_complete(self, request: Request) -> None:
        choices = [sequence.result for sequence in self._in_work[request.index]]
        finished = tuple(choice for choice in choices if choice is not None)
        if len(finished) == len(choices):
            del self._in_work[request.index]
            self._done.append(Outcome(request=request, choices=finished))

    def _fail(self, request: Request, error: RowError) -> None:
        for sequence in self._in_work.pop(request.index):
            sequence.is_dropped = True
            self._batcher.retire(sequence)
        self._done.append(Outcome(request=request, error=error))

    def _fail_broken(self, request: Request, place: str) -> None:
        """Fails a request whose logits are no numbers. Raises CheckpointError after too many."""
        message = f"the model's logits for this row are not finite, first seen in {place}"
        self._fail(request, RowError(status=500, code="nan_logits", message=message))
        self._num_broken += 1
        if self._num_broken > MAX_BROKEN_REQUESTS:
            raise CheckpointError(
                f"the logits of {self._num_broken} rows are not finite, the last in {place}; the "
                "weights are damaged, or the model needs another dtype (model.dtype)"
            )

    def _too_long(self, num_tokens: int) -> RowError:
        room = self._policy.num_kv_pages * PAGE_TOKENS
        return RowError(
            status=400,
            code="kv_cache_exceeded",
            message=f"prompt and answer need {num_tokens} tokens of keys and values, the memory "
            f"budget holds {room}; lower max_tokens or raise resources.dram",
            param="max_tokens",
        )

    def _count_layer(self, layer: int) -> None:
        if self._interruption is not None:
            raise self._interruption
        self.statistics.layer = layer

    def _after_pass(self, slices: list[Slice]) -> None:
        batcher = self._batcher
        if self._tail is not None:
            self._tail.after_pass(batcher)
        counts = self.statistics
        counts.num_passes += 1
        counts.layer = 0
        counts.prompt_tokens += sum(s.num_tokens for s in slices if not s.was_decoding)
        counts.num_running = len(batcher.running)
        counts.shared_tokens = batcher.num_shared_tokens
        counts.num_preempted = batcher.num_preempted
        counts.num_grown = self._tail.num_grown if self._tail else 0
        self.course.after_pass(slices, batcher, num_grown=counts.num_grown)


@contextmanager
def _between_passes() -> Iterator[None]:
    """What is done there cannot be done again: where the system refuses memory for it, a smaller
    plan has to go on from what there is."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise _out_of_memory("between passes", error) from error


def _beyond_grammar(fault: str) -> RowError:
    message = f"the answer cannot be held to its grammar any more: {fault}"
    return RowError(status=500, code="grammar_failed", message=message)


def _out_of_memory(where: str, error: Exception) -> OutOfMemory:
    return OutOfMemory(
        f"the system refuses memory {where}: {reason(error)}; lower resources.dram, or "
        "resources.vram where a GPU refuses, so that less is allocated beforehand"
    )


def _begun(sequence: Sequence) -> Begun:
    return Begun(tokens=tuple(sequence.output_tokens), logprobs=tuple(sequence.logprobs))


def _all_of(choice: Choice) -> Begun:
    return Begun(tokens=choice.tokens, logprobs=choice.logprobs or ())
