"""Fuzzing that is guided by what the readers do with an input; needs `pip install atheris`.

python -m tests.reliability.fuzz_atheris "input rows" --inputs 100000
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

atheris: Any = importlib.import_module("atheris")
with atheris.instrument_imports(include=["moebatch"]):
    from tests.reliability.fuzz_targets import TARGETS, Target

from tests.reliability.fuzz import WORDS, hit, scratch  # noqa: E402


def fuzz(target: Target, num_inputs: int) -> None:
    """Ends this process when it is done."""
    with scratch() as folder, scratch() as kept:
        corpus = kept / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(target.seeds):
            (corpus / str(number)).write_bytes(seed)
        options = [sys.argv[0], f"-runs={num_inputs}", f"-dict={_dictionary(kept)}"]
        options += ["-max_len=4096", "-timeout=10", "-rss_limit_mb=4096", str(corpus)]
        atheris.Setup(options, lambda data: hit(target, folder, data, "found by Atheris"))
        atheris.Fuzz()


def _dictionary(folder: Path) -> Path:
    path = folder / "words"
    entries = ("".join(f"\\x{byte:02x}" for byte in word) for word in WORDS if len(word) < 64)
    path.write_text("".join(f'"{entry}"\n' for entry in entries))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.fuzz_atheris")
    parser.add_argument("target", choices=[target.name for target in TARGETS])
    parser.add_argument("--inputs", type=int, default=10_000)
    asked = parser.parse_args()
    (target,) = (target for target in TARGETS if target.name == asked.target)
    fuzz(target, asked.inputs)


if __name__ == "__main__":
    main()
