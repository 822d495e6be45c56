"""llama.cpp with continuous batching, memory-mapped weights: its best case.

    python -m tests.benchmarks.jobs.peers.llama_driver MODEL.gguf ROWS.jsonl --seconds 60

Runs in the peer's own environment and prints a line of JSON for each number of sequences, doubling
it as long as that is faster. Of a job that takes longer than the seconds only a part is run: half
of the time prompts and answers as they come, then answers alone; the rest follows from a line
through the times of the calls, by their tokens alone: that later calls see more context is left
out, in its favour. Tokens are random, so that sampling costs it nothing.
"""

import argparse
import json
import os
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llama_cpp

from tests.benchmarks.jobs.estimate import Trial, line_through
from tests.benchmarks.jobs.lengths import Lengths
from tests.benchmarks.jobs.seats import Call, Seats

MOST_SEQUENCES = 256
_SMALL_CALL, _LARGE_CALL = 512, 2048
_FEWEST_DECODING = 2
Point = tuple[int, float]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first-batch", type=int, default=64)
    parser.add_argument("--longest-s", type=float, default=300.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--mapped", action="store_true", help="weights are never repacked")
    options = parser.parse_args()
    rows = [json.loads(line) for line in Path(options.rows).read_text().splitlines()]
    lengths = Lengths([len(row["prompt"]) for row in rows], [row["max_tokens"] for row in rows])
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    # What it repacks for its kernels it copies, into memory that no file is behind.
    params.use_extra_bufts = not options.mapped
    model = llama_cpp.llama_model_load_from_file(options.model.encode(), params)
    assert model, "the model was loaded"
    end = time.perf_counter() + options.longest_s
    most = min(MOST_SEQUENCES, len(rows))
    batch, best_s = min(options.first_batch, most), float("inf")
    while True:
        print(json.dumps({"trying": batch}), flush=True)
        trial = _trial(model, lengths, batch, options)
        print(json.dumps(asdict(trial)), flush=True)
        if trial.job_s > best_s or batch == most:
            return
        if time.perf_counter() > end:
            print(json.dumps({"ended": "no time for larger batches"}), flush=True)
            return
        best_s, batch = trial.job_s, min(most, 2 * batch)


class Context:
    """A cache for so many sequences, and the calls on it."""

    def __init__(self, model: Any, lengths: Lengths, batch: int, call_tokens: int, threads: int):
        longest = sorted(
            (a + b for a, b in zip(lengths.prompts, lengths.answers, strict=True)), reverse=True
        )
        params = llama_cpp.llama_context_default_params()
        # Room for rows of mean length with some to spare; never more than the longest ones need.
        mean = sum(longest) / len(longest)
        room = int(min(sum(longest[:batch]), 1.15 * batch * mean + longest[0]))
        params.n_ctx = -(-room // 256) * 256
        params.n_batch = params.n_ubatch = call_tokens
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._handle = llama_cpp.llama_init_from_model(model, params)
        if not self._handle:
            raise MemoryError("llama.cpp got no memory for its cache")
        self._memory = llama_cpp.llama_get_memory(self._handle)
        self._batch = llama_cpp.llama_batch_init(call_tokens, 0, 1)
        self._noise = random.Random(3)

    def run(self, call: Call) -> float:
        """Seconds of a call."""
        start, batch, count = time.perf_counter(), self._batch, 0
        for piece in call.pieces:
            for position in range(piece.start, piece.start + piece.num_tokens):
                batch.token[count] = self._noise.randrange(5, 30_000)
                batch.pos[count] = position
                batch.n_seq_id[count] = 1
                batch.seq_id[count][0] = piece.seat
                is_last = position == piece.start + piece.num_tokens - 1
                batch.logits[count] = piece.wants_logits and is_last
                count += 1
        batch.n_tokens = count
        code = llama_cpp.llama_decode(self._handle, batch)
        if code != 0:
            raise MemoryError(f"llama_decode: {code}")
        self.give_up(list(call.ended))
        return time.perf_counter() - start

    def give_up(self, seats: list[int]) -> None:
        for seat in seats:
            llama_cpp.llama_memory_seq_rm(self._memory, seat, -1, -1)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._handle)


def _trial(model: Any, lengths: Lengths, batch: int, options: argparse.Namespace) -> Trial:
    call_tokens = _LARGE_CALL if batch >= MOST_SEQUENCES // 2 else max(_SMALL_CALL, batch)
    context = Context(model, lengths, batch, call_tokens, options.threads)
    points, is_whole = _points(context, Seats(lengths, batch, call_tokens), options.seconds)
    context.close()
    line = line_through(points)
    measured_s = sum(seconds for _, seconds in points)
    job_s = measured_s
    if not is_whole:
        calls = Seats(lengths, batch, call_tokens).calls()
        job_s = sum(line.at(call.num_tokens) for call in calls)
    return Trial(
        batch=batch,
        job_s=job_s,
        measured_share=min(1.0, measured_s / job_s),
        detail=f"{line.at(batch):.2f} s for {batch} tokens, "
        f"{line.at(call_tokens):.2f} s for {call_tokens}",
    )


def _points(context: Context, seats: Seats, longest_s: float) -> tuple[list[Point], bool]:
    """Tokens and seconds of calls, and whether these are all calls of the job. Some in which
    answers alone go on are always among them, whatever the time."""
    points: list[Point] = []
    num_decoding, start = 0, time.perf_counter()
    for call in seats.calls():
        points.append((call.num_tokens, context.run(call)))
        num_decoding += call.only_decodes
        passed_s = time.perf_counter() - start
        if passed_s > longest_s / 2 and (not seats.is_closed or num_decoding == 0):
            context.give_up(seats.close())
        if passed_s > longest_s and num_decoding >= _FEWEST_DECODING:
            return points, False
    return points, not seats.is_closed


if __name__ == "__main__":
    main()
