"""A model in memory: its gradients are those of plain autograd, its gates can leave out what those
of a decoder leave out."""

from collections.abc import Callable
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from moebatch.checkpoint.model_files import open_model
from moebatch.errors import CheckpointError
from moebatch.model.routing.gating import AdaptiveGating, GatingCount
from moebatch.training.gating_trial import GatingTrial
from moebatch.training.learning_gates import LearningGates
from moebatch.training.memory import whole_footprint
from moebatch.training.reading import Reading, reading_batches
from moebatch.training.whole_model import WholeModel, load_whole
from tests.model.cases import CASES
from tests.model.driver import Driver, read_tensors
from tests.model.oracle import load, prompts
from tests.quantised import decoded_beside, write_quantised
from tests.shapes import load_shape
from tests.tiny import CACHED_APART, FAMILIES, edit_config, write_checkpoint

Checkpoint = Callable[..., Path]
SENSITIVITIES = {0: 1.0, 1: 0.3, 2: 3.0, 3: 0.5}
QUANTISABLE: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
}
RECURRENT_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"linear_key_head_dim": 64, "linear_value_head_dim": 48},
    "kimi_linear": {"linear_head_dim": 64},
    "minimax": {"head_dim": 64, "block_size": 64},
    "granitemoehybrid": {"mamba_d_state": 64, "hidden_size": 64, "num_hidden_layers": 3},
    "jamba": {"mamba_d_state": 16, "hidden_size": 64},
    "nemotron_h": {"ssm_state_size": 64, "hidden_size": 64, "mamba_head_dim": 16},
}
TOLERANCES = {"kimi_linear": 1e-3}
"""There transformers itself is 5e-4 to 8e-4 from what it computes in float64, further than ours."""
THREE_CHOICES = {"dbrx": CASES["dbrx-top-3"][1], "phimoe": {}}


def opened(folder: Path) -> tuple[Any, WholeModel]:
    module = load(folder)
    module.set_experts_implementation("eager")
    return module, WholeModel(module, Driver(folder).shape)


@pytest.mark.parametrize("lengths", [(1024,), (64,) * 16, (300, 300, 300)])
@pytest.mark.parametrize("family", RECURRENT_SIZES)
def test_what_recurrent_layers_keep_for_gradients_is_counted(
    tiny_checkpoint: Checkpoint, family: str, lengths: tuple[int, ...]
) -> None:
    """More than what autograd keeps, and not much more."""
    folder = tiny_checkpoint(family, max_position_embeddings=1024, **RECURRENT_SIZES[family])
    _, whole = opened(folder)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    tokens = torch.randint(3, 300, (sum(lengths),)).split(lengths)
    (batch,) = reading_batches([Reading(tuple(each.tolist())) for each in tokens])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        whole.squared_gradients(batch)
    files = open_model(folder, "float32")
    counted = whole_footprint(files, dtype=torch.float32, longest=max(lengths), learns=False)
    assert 0.3 < sum(kept.values()) / counted.terms["activations and their gradients"] < 1


def test_wider_heads_of_some_layers_keep_more_for_gradients(tiny_checkpoint: Checkpoint) -> None:
    kept = []
    for size in (20, 32):
        files = open_model(tiny_checkpoint("gemma4_text", global_head_dim=size), "float32")
        counted = whole_footprint(files, dtype=torch.float32, longest=4096, learns=False)
        kept.append(counted.terms["activations and their gradients"] / 4096)
    (heads,) = [each for each in files.shape.attentions if each.head_dim == 32]
    assert kept[1] - kept[0] == 4 * 4 * 12 * (heads.num_heads + heads.num_kv_heads)


@pytest.mark.few(family=CACHED_APART)
@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES,
        *("granitemoeshared", "granitemoehybrid", "lfm2_moe", "nemotron_h", "kimi_linear"),
        *("minimax", "bailing_hybrid"),
        *("ernie4_5_moe", "hunyuan_v1_moe", "dbrx", "phimoe", "flex_olmo"),
        *("mimo_v2_flash", "granitemoe_swa", "kolibri1", "flint", "lara_mini"),
        *("laguna", "cohere2_moe", "aria_text", "hy_v4", "jamba", "axk2", "minimax_m3_vl_text"),
        *("dots3_note_text", "beam"),
    ],
)
def test_gates_leave_out_what_those_of_a_decoder_do(
    tiny_checkpoint: Checkpoint, family: str
) -> None:
    folder = tiny_checkpoint(family, **THREE_CHOICES.get(family, {"num_experts_per_tok": 3}))
    is_flat = load_shape(folder).router.scores == "sigmoid"
    gating, count = AdaptiveGating(0.2 if is_flat else 0.06, SENSITIVITIES), GatingCount()
    driver = Driver(folder, gating=gating)
    module, whole = opened(folder)
    num_experts = driver.shape.num_experts

    def drop(layer: int, weights_RK: torch.Tensor, experts_RK: torch.Tensor) -> None:
        gating.drop(layer, weights_RK, experts_RK, num_experts)
        count.add(experts_RK == num_experts)

    texts = prompts(lengths=(17, 40))
    sequences = driver.generate(texts, 1)
    for text, sequence in zip(texts, sequences, strict=True):
        tokens = torch.tensor([text])
        with torch.inference_mode():
            exact = module(tokens).logits[0, -1]
            with whole.changed_gates(drop):
                expected = module(tokens).logits[0, -1]
            assert torch.equal(module(tokens).logits[0, -1], exact), "gates are as they were"
        tolerance = TOLERANCES.get(family, 2e-4)
        assert torch.allclose(sequence.logits[0], expected, atol=tolerance)
        assert not torch.allclose(expected, exact, atol=1e-2), "something was left out"
    mine = driver.decoder.gating_count
    assert mine is not None and 0.05 < count.single_share < 0.95
    assert (mine.num_decisions, mine.single_share, mine.mean_experts) == (
        count.num_decisions,
        count.single_share,
        count.mean_experts,
    )


@pytest.mark.few(family=CACHED_APART)
@pytest.mark.parametrize(
    "family",
    [
        *(*FAMILIES, "dbrx", "phimoe", "granitemoehybrid", "lfm2_moe", "nemotron_h"),
        *("kimi_linear", "minimax", "bailing_hybrid", "jamba"),
    ],
)
def test_squared_gradients_are_those_of_plain_autograd(
    tiny_checkpoint: Checkpoint, family: str
) -> None:
    """Of something that is added to what the experts make, one sequence after the other; together
    they are filled up to one length."""
    module, whole = opened(tiny_checkpoint(family))
    readings = [Reading(tuple(text), 5) for text in prompts(lengths=(9, 9, 14))]
    expected = dict.fromkeys(whole.routers, 0.0)
    blocks = [each for each in module.modules() if hasattr(each, "experts")]
    for reading in readings:
        tokens = reading.tokens
        added = [torch.zeros(1, len(tokens), 32, requires_grad=True) for _ in blocks]
        hooks = [
            block.register_forward_hook(
                lambda _, inputs, output, more=more: (
                    (output[0] + more, *output[1:]) if isinstance(output, tuple) else output + more
                )
            )
            for block, more in zip(blocks, added, strict=True)
        ]
        shares = module(torch.tensor([tokens])).logits[0].log_softmax(-1)
        said = [-shares[place - 1, tokens[place]] for place in range(5, len(tokens))]
        torch.autograd.backward(torch.stack(said).sum())
        for hook in hooks:
            hook.remove()
        for layer, more in zip(expected, added, strict=True):
            assert more.grad is not None
            expected[layer] += float((more.grad**2).sum())
    found = dict.fromkeys(expected, 0.0)
    for batch in reading_batches(readings):
        for layer, of_batch in whole.squared_gradients(batch).items():
            found[layer] += of_batch
    assert found == {layer: pytest.approx(of, rel=1e-3) for layer, of in expected.items()}


def test_a_prompt_is_answered_as_transformers_answers_it(tiny_checkpoint: Checkpoint) -> None:
    """Greedily, whatever its authors suggest."""
    module, whole = opened(tiny_checkpoint("mixtral"))
    suggested = module.generation_config
    suggested.eos_token_id, suggested.num_beams, suggested.repetition_penalty = 2, 3, 1.5
    asked = torch.tensor(prompts(lengths=(6, 6)))
    for prompt, answer in zip(asked, whole.answers(asked, 5), strict=True):
        tokens = prompt.tolist()
        for token in answer:
            with torch.inference_mode():
                assert token == int(module(torch.tensor([tokens])).logits[0, -1].argmax())
            tokens.append(token)
        assert len(answer) == 5 or answer[-1] == 2


def test_a_model_that_transformers_would_rotate_otherwise_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "dbrx")
    whole = load_whole(open_model(folder, "auto"), dtype=torch.float32, experts="grouped_mm")
    assert whole.logits(torch.tensor([[3, 4]])).shape == (1, 2, 320)
    edit_config(folder, rope_parameters=None)
    message = r"rope_theta 10000\.0 instead of attn_config\.rope_theta \(5000\.0\)"
    with pytest.raises(CheckpointError, match=message):
        load_whole(open_model(folder, "auto"), dtype=torch.float32, experts="eager")


LAYERS_THAT_ARE_PLAIN = {"ignore": ["lm_head", "re:.*gate$", "re:.*self_attn.*"]}


@pytest.mark.parametrize(
    ("kind", "said"),
    [("fp8", {}), ("int4", LAYERS_THAT_ARE_PLAIN), ("packed-int8", LAYERS_THAT_ARE_PLAIN)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_model_is_what_its_weights_stand_for(
    tmp_path: Path, kind: str, said: dict[str, Any], dtype: torch.dtype
) -> None:
    """In numbers as wide as they are asked for, and in the memory that takes."""
    source = write_checkpoint(tmp_path / "plain", "qwen3_moe", **QUANTISABLE)
    coded = write_quantised(source, kind, tmp_path / kind, said=said)
    files, decoded = (open_model(folder, "auto") for folder in (coded, decoded_beside(coded)))
    found, expected = (
        load_whole(of, dtype=dtype, experts="eager").logits(torch.tensor([[3, 4, 90, 17]]))
        for of in (files, decoded)
    )
    assert found.dtype is dtype
    assert torch.allclose(found, expected, atol=1e-3, rtol=1e-3)
    weights = [
        whole_footprint(of, dtype=dtype, longest=9, learns=False).terms["weights"]
        for of in (files, decoded)
    ]
    num_numbers = sum(tensor.numel() for tensor in read_tensors(source).values())
    assert weights[0] == weights[1] == num_numbers * dtype.itemsize


def test_a_model_of_which_transformers_would_make_weights_up_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "plain", "qwen3_moe", **QUANTISABLE)
    folder = write_quantised(source, "mxfp4", tmp_path / "mxfp4")
    message = r"finds no 'model\.layers\.0\.mlp\.experts\.down_proj' \(6 in all\)"
    with pytest.raises(CheckpointError, match=message):
        load_whole(open_model(folder, "auto"), dtype=torch.float32, experts="eager")


def test_a_trial_counts_no_filling(tiny_checkpoint: Checkpoint) -> None:
    """Together, texts of several lengths give what each gives by itself."""
    folder = tiny_checkpoint("olmoe")
    _, whole = opened(folder)
    readings = [Reading(tuple(text)) for text in prompts(lengths=(4, 9, 23))]
    num_experts = Driver(folder).shape.num_experts

    def trial(texts: list[Reading]) -> GatingTrial:
        return GatingTrial(whole, texts, SENSITIVITIES, num_experts)

    together = trial(readings).at(0.02)
    alone = [trial([reading]).at(0.02) for reading in readings]
    assert 0.05 < together.single_share < 0.95
    shares = [point.single_share * len(of) for point, of in zip(alone, readings, strict=True)]
    assert together.single_share == pytest.approx(sum(shares) / 36)
    losses = [
        log(point.perplexity) * of.num_expected for point, of in zip(alone, readings, strict=True)
    ]
    assert log(together.perplexity) == pytest.approx(sum(losses) / 33, rel=1e-4)
    assert trial(readings).measure(1.0).single_share > 0.99


def test_gates_that_are_corrected_from_outside_stay_at_their_layers(
    tiny_checkpoint: Checkpoint,
) -> None:
    _, whole = opened(tiny_checkpoint("minimax_m2"))
    with pytest.raises(CheckpointError, match="pre-gates cannot learn"):
        LearningGates(whole, 1)
    LearningGates(whole, 0).close()
    for family in ("glm4_moe", "hunyuan_v1_moe"):
        _, whole = opened(tiny_checkpoint(family))
        gates = LearningGates(whole, 1)
        assert {weight.shape[1] for weight in gates.weights} == {32}
        gates.close()
