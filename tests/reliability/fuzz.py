"""Feeds whatever reads files with damaged ones; `fuzz_atheris` does it guided by coverage.

python -m tests.reliability.fuzz --inputs 100000 [--only "input rows"] [--seed 1]
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.reliability.fuzz_targets import TARGETS, Target

_LONGEST_S = 300
WORDS = (
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b"'",
        b":",
        b",",
        b"\\",
        b"\n",
        b"\r",
        b"\0",
        b"\t",
        b" ",
        b"-",
    ),
    *(
        b"null",
        b"true",
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"-1",
        b"0",
        b"0.5",
        b"9" * 5000,
        b"1e-400",
    ),
    *(b"\xef\xbb\xbf", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\x1b[2J", b"\x9b"),
    *(rb'"\ud800"', rb'"\u0000"', b"[" * 3000, b'{"a":' * 3000, b"&a [*a]", b"*a", b"<<: *a"),
    *(b"!!python/object/apply:os.system [x]", b"!!binary aaaa", b"2026-11-21", b"0x1f", b"1_000"),
    *(b"../../etc/passwd", b"/dev/zero", b"/dev/stdin", b"~", b"$HOME", b"{{ 7*7 }}", b"{% for %}"),
    *(b"\x1b[2J" * 3000, b"\xe2\x80\xae", rb'"\udfff"', b"9" * 4000, b"1:" * 3000 + b"1"),
    *(
        b"range(99999)",
        b"{{ 'a' * 99999 }}",
        b"Precompiled",
        b"18446744073709551616",
        b"-9223372036854775809",
        b"inf",
        b"1GiB",
        b"0GiB",
        b"1e30GiB",
    ),
)
"""What has broken readers before."""


class TooSlow(Exception):
    """A reader has hung."""


def mutated(noise: random.Random, seeds: tuple[bytes, ...]) -> bytes:
    """A seed with a few changes, or bytes that are like nothing."""
    if noise.random() < 0.02:
        return noise.randbytes(noise.randint(0, 300))
    data = bytearray(noise.choice(seeds))
    for _ in range(noise.choice((1, 1, 2, 3, 8))):
        start = noise.randint(0, len(data))
        end = min(len(data), start + noise.choice((0, 1, 1, 3, 10, 50)))
        kind = noise.randrange(5)
        if kind == 0:
            data[start:end] = noise.choice(WORDS)
        elif kind == 1:
            data[start:end] = b""
        elif kind == 2:
            data[start:start] = data[start:end] * noise.choice((1, 2, 30))
        elif kind == 3:
            data[start:end] = noise.randbytes(end - start)
        else:
            other = noise.choice(seeds)
            cut = noise.randint(0, len(other))
            data[start:end] = other[cut : cut + noise.randint(0, 40)]
    return bytes(data)


def fuzz(target: Target, num_inputs: int, seed: int) -> int:
    """Feeds a target; returns how many inputs it took. Raises what a user must never see, with the
    input that did it."""
    noise, num_taken = random.Random(f"{seed} {target.name}"), 0
    with scratch() as folder:
        target.hit(folder, target.seeds[0])  # imports what it needs, in its own time
        for number in range(num_inputs):
            num_taken += hit(target, folder, mutated(noise, target.seeds), f"input {number}")
    return num_taken


def hit(target: Target, folder: Path, data: bytes, name: str) -> bool:
    """Feeds one input in an empty folder."""
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    try:
        with _limited():
            return target.hit(folder, data)
    except BaseException:
        print(f"{target.name}, {name}: {data[:2000]!r}", file=sys.stderr)
        raise


@contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder while the block runs."""
    with tempfile.TemporaryDirectory(prefix="moebatch-fuzz-") as name:
        yield Path(name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="all targets together")
    parser.add_argument("--only", choices=[target.name for target in TARGETS], action="append")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    targets = [target for target in TARGETS if target.name in (asked.only or target.name)]
    start, share = time.monotonic(), -(-asked.inputs // len(targets))
    for target in targets:
        taken = fuzz(target, share, asked.seed)
        print(f"{target.name}: {share} inputs, {taken} of them good")
    print(f"{share * len(targets)} inputs in {time.monotonic() - start:.0f} s: nothing got through")


if __name__ == "__main__":
    main()
