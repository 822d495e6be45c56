"""Which layer a pass is at, as progress shows it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.engine.build import build_engine
from moebatch.engine.spec import EngineSpec
from moebatch.model.decoder import Decoder
from moebatch.spec.policy.policy import Policy
from moebatch.spec.request import Request
from tests.engine.test_encoders import FAMILY, ROWS, WHERE
from tests.engine.test_engine import TokenText, policy, requests
from tests.engine.test_schedules import EMULATED, emulated

HOW: dict[str, tuple[Policy, dict[str, Any]]] = {
    "plain": (policy(), {"is_plain": True}),
    "klotski": (policy(), {}),
    "multi": (policy(), {}),
    "simple": (policy(), {}),
    "cgopipe": (EMULATED["CPU attention"], {"device": "emulated"}),
    "flexgen": (EMULATED["three levels"], {"device": "emulated"}),
}


def layers_of(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    chosen: Policy,
    rows: Sequence[Request],
    **options: Any,
) -> list[tuple[int, int, int]]:
    """Of each attention that is computed on behalf of a micro-batch, the pass and the layer that
    are shown, and the layer that it is of."""
    options |= {"device": emulated()} if "device" in options else {}
    order = EngineSpec(
        files=open_model(folder, "float32"), policy=chosen, max_tokens=112, **options
    )
    built = build_engine(order, decoder=TokenText(), end_tokens=frozenset(), job_seed=0)
    shown = built.engine.statistics
    found: list[tuple[int, int, int]] = []

    def watch(name: str) -> None:
        original = getattr(Decoder, name)

        def watching(decoder: Decoder, layer: int, *others: Any, **named: Any) -> Any:
            found.append((shown.num_passes, shown.layer, layer))
            return original(decoder, layer, *others, **named)

        monkeypatch.setattr(Decoder, name, watching)

    for name in ("attend", "project", "route"):
        watch(name)
    try:
        with torch.inference_mode():
            for _ in built.engine.run(rows):
                assert shown.layer == 0, "between passes the next one has not begun a layer"
    finally:
        built.close()
    return found


@pytest.mark.parametrize("name", HOW)
def test_a_layer_is_shown_from_the_first_tokens_that_attend_in_it(
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
) -> None:
    chosen, options = HOW[name]
    if name != "plain":
        chosen = replace(chosen, schedule=name)
    found = layers_of(
        monkeypatch, tiny_checkpoint("mixtral"), chosen, requests(), scratch=tmp_path, **options
    )
    ahead = name == "cgopipe"  # the CPU attends in the next layer while the GPU ends this one
    assert all(shown in (layer, layer + ahead) for _, shown, layer in found)
    assert {number for number, _, _ in found} >= {0, 1, 2}


def test_layers_that_a_pass_leaves_out_are_not_shown(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = replace(WHERE["streamed"], schedule="klotski")
    found = layers_of(monkeypatch, tiny_checkpoint(FAMILY), chosen, ROWS)
    assert all(shown == layer for _, shown, layer in found)
    last = max(number for number, _, _ in found)
    assert 0 not in {shown for number, shown, _ in found if number == last}
