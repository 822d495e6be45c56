"""The command line of the benchmark."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from moebatch.units import parse_bytes
from tests.benchmarks.jobs.checkpoint import SHAPES, STORED

_PROG = "python -m tests.benchmarks.jobs"
_ABOUT = """A benchmark that anybody can repeat: makes a checkpoint of about 6 GB once, measures the
machine, runs a fixed set of jobs under a memory cap, and prints for each what was
measured, what was predicted, and how far that is from what the machine could do at best. Peers run
the same rows under the same cap, where their environments are given."""
_COMPARISONS = {
    "variants": "the same jobs with one thing switched off; default: not with --small",
    "peers": "other programs, where their interpreters are given; default: not with --small",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for."""

    folder: Path
    shape: str
    is_small: bool
    only: tuple[str, ...]
    weights: tuple[str, ...]
    cap_bytes: int
    dram_bytes: int
    with_variants: bool
    accelerate_python: Path | None
    llama_python: Path | None
    llama_sources: Path | None
    accelerate_memory: str
    peer_s: float
    probe_s: float
    json: Path | None


def parse_options(
    known_jobs: tuple[str, ...],
    more_jobs: tuple[str, ...] = (),
    arguments: list[str] | None = None,
) -> Options:
    """Ends the program with a message if something is wrong. What is in `more_jobs` is run only if
    it is asked for."""
    parser = argparse.ArgumentParser(prog=_PROG, description=_ABOUT)
    there, also = ", ".join(known_jobs), ", ".join(more_jobs)
    parser.add_argument(
        "--small",
        action="store_true",
        help="fewer rows, no peers: five minutes with the first shape",
    )
    parser.add_argument("--only", default="", metavar="JOBS", help=f"some of {there}, {also}")
    parser.add_argument(
        "--folder", type=Path, default=default_folder(), help="default: %(default)s"
    )
    parser.add_argument("--shape", choices=SHAPES, default="mixtral", help="of the checkpoint")
    parser.add_argument(
        "--weights",
        default=STORED,
        metavar="FORMATS",
        help=f"run each job with each, such as {STORED},int8,int4; peers run beside {STORED}",
    )
    parser.add_argument("--cap", default="3GiB", help="memory of a process, page cache included")
    parser.add_argument("--dram", default="2.8GiB", help="resources.dram of the jobs")
    for what, meaning in _COMPARISONS.items():
        parser.add_argument(f"--{what}", action=argparse.BooleanOptionalAction, help=meaning)
    for peer in ("accelerate", "llama"):
        name = f"MOEBATCH_{peer.upper()}_PYTHON"
        parser.add_argument(
            f"--{peer}-python",
            type=Path,
            default=os.environ.get(name),
            metavar="PATH",
            help=f"interpreter of an environment that has it; default: ${name}",
        )
    parser.add_argument(
        "--llama-sources",
        type=Path,
        default=os.environ.get("MOEBATCH_LLAMA_SOURCES"),
        metavar="FOLDER",
        help="of llama.cpp, whose converter makes its file; default: $MOEBATCH_LLAMA_SOURCES",
    )
    parser.add_argument("--accelerate-memory", default="1GiB", help="of weights it may keep")
    parser.add_argument("--peer-s", type=float, default=300.0, help="seconds per peer and job")
    parser.add_argument("--probe-s", type=float, default=None, help="seconds of reading per probe")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    asked = parser.parse_args(arguments)
    only, weights = _listed(asked.only), _listed(asked.weights)
    unknown = [name for name in only if name not in (*known_jobs, *more_jobs)]
    if unknown:
        parser.error(f"--only: no job is named {unknown[0]!r}; there are {there}, {also}")
    with_peers = not asked.small if asked.peers is None else asked.peers
    given = {
        name: Path(path) if path and with_peers else None
        for name, path in (("a", asked.accelerate_python), ("l", asked.llama_python))
    }
    return Options(
        folder=asked.folder.expanduser().absolute(),
        shape=asked.shape,
        is_small=asked.small,
        only=only or known_jobs,
        weights=weights,
        cap_bytes=parse_bytes(asked.cap),
        dram_bytes=parse_bytes(asked.dram),
        with_variants=not asked.small if asked.variants is None else asked.variants,
        accelerate_python=given["a"],
        llama_python=given["l"],
        llama_sources=asked.llama_sources,
        accelerate_memory=asked.accelerate_memory,
        peer_s=asked.peer_s,
        probe_s=asked.probe_s or (1.5 if asked.small else 6.0),
        json=asked.json,
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def default_folder() -> Path:
    """In the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "moebatch" / "benchmark"
