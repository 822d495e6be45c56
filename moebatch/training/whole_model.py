"""A model as transformers computes it, all of it in memory, for what a stream cannot show.

Shape letters: B sequences, S positions, V vocabulary, R rows, D hidden, E experts, K experts per
token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from math import exp
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moebatch.checkpoint.model_files import ModelFiles
from moebatch.errors import CheckpointError
from moebatch.quoting import reason, shown
from moebatch.spec.families.registry import FAMILIES
from moebatch.spec.model.shape import ModelShape
from moebatch.training.reading import Reading, ReadingBatch, num_expected, reading_batches

ChangeGate = Callable[[int, Tensor, Tensor], None]
"""Gets the layer, weights [R, K] in float32, in descending order, and experts [R, K], which it may
change in place; the number of experts stands for a choice that is left out."""


ANSWER_TOKENS = 64
"""Most tokens of an answer that is given to a prompt."""
ExpertsWay = Literal["eager", "grouped_mm"]
"""How transformers computes experts. One by one (eager) is the only way in which choices that are
left out are passed over; all in one product (grouped_mm) is about three times as fast with
gradients (16 experts, 4 of which are chosen, 1,024 tokens, float32)."""
_BLOCKS = ("block_sparse_moe", "mlp", "ffn", "feed_forward", "mixer")
"""What families call gate and experts of a layer; some have an MLP beside them."""


class WholeModel:
    """Losses, their gradients, and what becomes of both when gates choose otherwise."""

    def __init__(self, module: Any, shape: ModelShape) -> None:
        """`module` is a causal model of transformers; nothing of it can learn from now on."""
        self._module = module.eval().requires_grad_(False)
        self._num_experts, self._max_positions = shape.num_experts, shape.max_positions
        layers = _first_of(module.base_model, "layers", "blocks")
        self._blocks = {
            layer: _first_of(layers[shape.numbers_of(layer)[1]], *_BLOCKS)
            for layer in shape.moe_layers
        }

    @property
    def routers(self) -> Mapping[int, Any]:
        """The gates, by layer; `gate_matrix` is what they multiply with."""
        return {layer: _first_of(block, "gate", "router") for layer, block in self._blocks.items()}

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Of the token after each, [B, S, V]."""
        logits_BSV: Tensor = self._module(tokens_BS, use_cache=False).logits
        return logits_BSV

    def loss(self, batch: ReadingBatch) -> Tensor:
        """Sum of the losses of all tokens that count, in nats, in float32."""
        is_expected = batch.is_expected_BS[:, 1:]
        expected = batch.tokens_BS[:, 1:][is_expected]
        logits = self.logits(batch.tokens_BS)[:, :-1][is_expected]
        return F.cross_entropy(logits.float(), expected, reduction="sum")

    def perplexity(self, readings: Sequence[Reading]) -> float:
        """exp of the mean loss of the tokens that count."""
        with torch.inference_mode():
            loss = sum(float(self.loss(batch)) for batch in reading_batches(readings))
        return exp(loss / num_expected(readings))

    def squared_gradients(self, batch: ReadingBatch) -> dict[int, float]:
        """By MoE layer, the sum of (dL/dO)^2 over tokens and hidden dimensions: L the loss of the
        batch, O what the layer's experts make of a token."""
        outputs: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable[[Any, Any, Any], None]:
            # Nothing before the first of them has to be kept.
            return lambda module, inputs, output: outputs.__setitem__(
                layer, (output[0] if isinstance(output, tuple) else output).requires_grad_()
            )

        with ExitStack() as hooks, torch.enable_grad():
            for layer, block in self._blocks.items():
                hooks.callback(block.register_forward_hook(keep(layer)).remove)
            gradients = torch.autograd.grad(self.loss(batch), list(outputs.values()))
        return {
            layer: float(gradient.double().square().sum())
            for layer, gradient in zip(outputs, gradients, strict=True)
        }

    def fisher_sums(self, readings: Sequence[Reading]) -> dict[int, float]:
        """How much what experts make matters to the loss: of each MoE layer, the sum of the
        diagonal of F = mean of g g^T over tokens, where g = dL/dO: L the loss of a sequence, O what
        the layer's experts make of a token (AdapMoE, Eq. 6)."""
        sums: dict[int, float] = {}
        for batch in reading_batches(readings):
            for layer, of_batch in self.squared_gradients(batch).items():
                sums[layer] = sums.get(layer, 0.0) + of_batch
        num_tokens = sum(map(len, readings))
        return {layer: of / num_tokens for layer, of in sums.items()}

    @contextmanager
    def changed_gates(self, change: ChangeGate) -> Iterator[None]:
        """What all gates say goes through `change` first."""
        with ExitStack() as hooks:
            for layer, block in self._blocks.items():
                hook = _changing(layer, change, self._num_experts)
                hooks.callback(block.experts.register_forward_pre_hook(hook).remove)
            yield

    def answered(self, prompts: Sequence[Reading]) -> list[Reading]:
        """Prompts with what the model itself says to them, greedily, the longest first: the text
        that it surely should expect."""
        found = []
        for length, alike in groupby(sorted(prompts, key=len, reverse=True), key=len):
            max_tokens = min(ANSWER_TOKENS, self._max_positions - length)
            for batch in reading_batches(list(alike)):
                said = self.answers(batch.tokens_BS, max_tokens)
                for prompt, answer in zip(batch.tokens_BS.tolist(), said, strict=True):
                    found.append(Reading((*prompt, *answer), length))
        return found

    def answers(self, prompts_BS: Tensor, max_tokens: int) -> list[tuple[int, ...]]:
        """What the model says, greedily, to prompts of one length; up to its end token, or to so
        many tokens."""
        from transformers import GenerationConfig

        usual = self._module.generation_config
        ends = usual.eos_token_id
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=ends,
            pad_token_id=0 if usual.pad_token_id is None else usual.pad_token_id,
        )
        # Of one that is given, what it does not say goes by the model's own: beams, penalties.
        self._module.generation_config = config
        with torch.inference_mode():
            said_BS = self._module.generate(prompts_BS, attention_mask=torch.ones_like(prompts_BS))
        ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
        return [_up_to_end(said, ends) for said in said_BS[:, prompts_BS.shape[1] :].tolist()]


def _first_of(module: Any, *names: str) -> Any:
    """What families call by one of these names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def gate_matrix(gate: Any) -> nn.Parameter:
    """The weight [E, D] of a gate."""
    matrix = _first_of(gate, "weight", "layer", "wg", "gate")
    return matrix if isinstance(matrix, nn.Parameter) else matrix.weight


def _changing(
    layer: int, change: ChangeGate, num_experts: int
) -> Callable[[Any, tuple[Tensor, Tensor, Tensor]], Any]:
    """Stands before the experts of a layer, which in all families are called alike."""

    def hook(module: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> Any:
        hidden_RD, experts_RK, weights_RK = inputs
        changed_RK, order_RK = weights_RK.float().sort(dim=-1, descending=True)
        experts_RK = experts_RK.gather(1, order_RK)
        change(layer, changed_RK, experts_RK)
        # Not every family passes over what is left out: the first choice once more, for nothing.
        is_left_out_RK = experts_RK == num_experts
        changed_RK.masked_fill_(is_left_out_RK, 0.0)
        experts_RK = torch.where(is_left_out_RK, experts_RK[:, :1], experts_RK)
        return hidden_RD, experts_RK, changed_RK.to(weights_RK.dtype)

    return hook


def _up_to_end(said: list[int], ends: Sequence[int]) -> tuple[int, ...]:
    """With its end token."""
    stop = next((place + 1 for place, token in enumerate(said) if token in ends), len(said))
    return tuple(said[:stop])


def require_learnable(files: ModelFiles) -> WholeModel:
    """A model that `load_whole` can load, without its weights, of which none is read. Raises
    CheckpointError for any other."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, shape = files.checkpoint.folder, files.shape
    router = shape.router
    is_other = router.weighs_inputs or router.has_own_norm or router.num_identities
    if is_other or shape.hashed_layers:
        raise CheckpointError(
            f"{folder}: gates of {shape.architecture} cannot be changed in transformers; "
            "experts.gating has to be exact"
        )
    if files.checkpoint.is_gguf:
        raise CheckpointError(f"{folder}: gates cannot learn from GGUF; use safetensors files")
    with _loading(folder), torch.device("meta"):
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        module = AutoModelForCausalLM.from_config(config)
    return WholeModel(module, shape)


def load_whole(files: ModelFiles, *, dtype: torch.dtype, experts: ExpertsWay) -> WholeModel:
    """The model, for which `require_learnable` holds, with all of its weights. Raises
    CheckpointError, also where transformers does not find them all: it would make others up.

    Args:
        dtype: that of the model where its loss is asked about as it runs; float32 where something
            learns, whose steps are too small for other numbers.
        experts: how those are computed, which depends on what is to be done with the model.
    """
    from transformers import AutoModelForCausalLM

    folder = files.checkpoint.folder
    with _loading(folder):
        module, found = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            experts_implementation="eager",
            output_loading_info=True,
        )
    missing = sorted(found["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{folder}: transformers cannot load it: of the weights as they are stored here it "
            f"finds no {shown(missing[0])} ({len(missing)} in all), and would make them up; gates "
            "cannot learn from this checkpoint"
        )
    _require_its_positions(module, files)
    with suppress(ValueError):  # some families have no other way
        module.set_experts_implementation(experts)
    for parameter in module.parameters():
        # Some are still the mapped files themselves, and what is decoded need not be of `dtype`.
        is_half = parameter.dtype in (torch.bfloat16, torch.float16)
        parameter.data = parameter.data.to(dtype if is_half else parameter.dtype, copy=True)
    return WholeModel(module, files.shape)


def _require_its_positions(module: Any, files: ModelFiles) -> None:
    """transformers does not look everywhere where families keep the base of rotary positions."""
    family = FAMILIES[files.shape.architecture]
    spelling, said = family.spelling, family.keys(files.config).value("rope_theta")
    parameters = getattr(module.config.get_text_config(), "rope_parameters", None) or {}
    found = parameters.get("rope_theta")
    if "rope_theta" in spelling and said is not None and found != said:
        raise CheckpointError(
            f"{files.checkpoint.folder}: transformers would compute it with rope_theta "
            f"{shown(found)} instead of {spelling['rope_theta']} ({shown(said)}), and what is "
            "learnt with it would be for another model; write the latter under rope_parameters "
            "into config.json, as rope_theta, and default as rope_type"
        )


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """transformers works on a model folder, and says nothing on the way. Raises CheckpointError
    for whatever it raises."""
    from transformers.utils import logging

    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # Damaged files make its libraries raise anything.
        raise CheckpointError(f"{folder}: transformers cannot load it: {reason(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
