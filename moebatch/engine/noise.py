"""Chance without a generator: every draw has its own number, computed from what it is for."""

import hashlib

from moebatch.spec.request import Request

NOISE_BITS = 53


def noise(request: Request, *, choice: int, position: int, job_seed: int) -> int:
    """Uniform integer in [0, 2**NOISE_BITS) for one token of one sequence.

    It depends on (row seed, choice, position) where the row has a seed, so that equal rows with
    equal seeds agree, and else on (job seed, custom_id, choice, position). It never depends on
    batching, order, sharding or resuming.
    """
    seed = request.sampling.seed
    # The free text comes last and the two kinds differ in their first word, so keys never collide.
    if seed is not None:
        key = f"row:{seed}:{choice}:{position}"
    else:
        key = f"job:{job_seed}:{choice}:{position}:{request.custom_id}"
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - NOISE_BITS)
