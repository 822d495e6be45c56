"""What a config.json says to us, and what it says to transformers."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moebatch.errors import CheckpointError
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.model.shape import ModelShape
from moebatch.spec.model.shape_reader import read_planned_shape, read_shape
from tests import tiny


def transformers(family: str, **entries: Any) -> Any:
    """What transformers makes of a config.json of that model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with tiny.quiet():
        return CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(entries)))


def assert_as_many_layers(shape: ModelShape, config: Any) -> None:
    """And as wide; experts are in those of transformers' that are sparse."""
    assert (shape.num_layers, shape.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    kinds = getattr(config, "mlp_layer_types", ())
    if "sparse" in kinds or "dense" in kinds:
        assert shape.moe_layers == tuple(n for n, kind in enumerate(kinds) if kind == "sparse")


@dataclass(frozen=True, slots=True)
class Described:
    """Files of one family."""

    family: str
    architecture: str
    text: str | None = None
    """What model of text a file describes beside others."""

    def shape_of(self, **entries: Any) -> ModelShape:
        """What we make of one."""
        return read_shape(self._file(entries), "m/config.json")

    def faults_of(self, **entries: Any) -> str:
        """What is wrong with one that is refused."""
        with pytest.raises(CheckpointError) as caught:
            read_planned_shape(self._file(entries), "m/config.json")
        return str(caught.value)

    def refuses(
        self, *cases: tuple[dict[str, Any], str], **usual: Any
    ) -> Callable[[dict[str, Any], str], None]:
        """A test that a file with some entries beside the usual ones is refused, with messages that
        say so."""

        @pytest.mark.parametrize(("entries", "message"), cases)
        def refused(entries: dict[str, Any], message: str) -> None:
            assert message in self.faults_of(**{**usual, **entries})

        return refused

    def transformers(self, **entries: Any) -> Any:
        """What transformers makes of one."""
        if self.text is None:
            return transformers(self.family, **entries)
        return transformers(self.family, text_config=self._text(entries)).text_config

    def both(self, **entries: Any) -> tuple[ModelShape, Any]:
        """What we and what transformers make of one."""
        shape, config = self.shape_of(**entries), self.transformers(**entries)
        assert_as_many_layers(shape, config)
        return shape, config

    def assert_tensors_are_those_of_transformers(self, **entries: Any) -> None:
        """But for those of experts, which are counted where all of them compute something."""
        from transformers import AutoModelForCausalLM

        with tiny.quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.transformers(**entries))
        tensors = model.state_dict()
        sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        shape, names = self.shape_of(**entries), FAMILIES[self.architecture].names
        ours = dict(names.global_weights(shape, sizes).values())
        for layer in range(shape.num_layers):
            ours |= dict(names.layer_weights(shape, layer, sizes).values())
        assert ours == {name: size for name, size in sizes.items() if ".experts." not in name}
        if not shape.router.num_identities:
            assert shape.num_params == sum(tensor.numel() for tensor in tensors.values())

    def _file(self, entries: Any) -> dict[str, Any]:
        own = {"architectures": [self.architecture], "model_type": self.family}
        return {**own, **(entries if self.text is None else {"text_config": self._text(entries)})}

    def _text(self, entries: Any) -> dict[str, Any]:
        return {"model_type": self.text, **entries}
