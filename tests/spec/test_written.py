"""What files may leave out, and names of keys, are what the classes of transformers say."""

import json

from tests.spec.written import FILE, written


def test_defaults_and_names_are_those_of_transformers() -> None:
    """A later transformers may say more; `python -m tests.spec.written` takes that over."""
    kept, said = json.loads(FILE.read_text()), json.loads(json.dumps(written()))
    assert kept.keys() == said.keys()
    for kind, of_kind in kept.items():
        for part in ("defaults", "aliases"):
            assert of_kind.get(part, {}).items() <= said[kind].get(part, {}).items(), kind
