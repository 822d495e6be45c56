"""What a checkpoint is said to hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moebatch.checkpoint.inventory import Inventory
from moebatch.checkpoint.model_files import open_model


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"family": "qwen2_moe"}, "shared experts"),
        ({"family": "nemotron_h", "moe_latent_size": 18}, "latents of experts"),
        ({"family": "deepseek_v4"}, "streams"),
        ({"family": "hy_v4"}, "streams"),
        ({"family": "axk2"}, "shared experts"),
        ({"family": "mistral_large4"}, "attention"),
        ({"family": "dots3_note"}, "attention"),
        ({"family": "beam"}, "attention"),
        ({"family": "muse_spark"}, "norms"),
    ],
)
def test_every_number_of_a_model_is_of_a_kind(
    tiny_checkpoint: Callable[..., Path], options: dict[str, Any], kind: str
) -> None:
    files = open_model(tiny_checkpoint(**options), "auto")
    kinds = {found.kind: found.num_numbers for found in Inventory.of(files).kinds}
    assert kinds[kind] > 0
    assert sum(kinds.values()) == files.shape.num_params
