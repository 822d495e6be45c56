"""All families that can be computed."""

from dataclasses import replace

from moebatch.model.families.family import Family
from moebatch.model.families.usual import USUAL
from moebatch.model.latent_attention import LatentAttentionBlock
from moebatch.registry import Registry
from moebatch.spec.families.family import FamilySpec
from moebatch.spec.families.registry import FAMILIES as DESCRIBED

_LATENT = replace(USUAL, attention=LatentAttentionBlock)
FAMILIES = Registry(
    {
        "MixtralForCausalLM": USUAL,
        "Qwen2MoeForCausalLM": USUAL,
        "Qwen3MoeForCausalLM": USUAL,
        "Qwen3VLMoeForConditionalGeneration": USUAL,
        "Qwen3NextForCausalLM": USUAL,
        "Qwen3_5MoeForCausalLM": USUAL,
        "Qwen3_5MoeForConditionalGeneration": USUAL,
        "OlmoeForCausalLM": USUAL,
        "Glm4MoeForCausalLM": USUAL,
        "MiniMaxM2ForCausalLM": USUAL,
        "GptOssForCausalLM": USUAL,
        "Gemma4ForCausalLM": USUAL,
        "Gemma4ForConditionalGeneration": USUAL,
        "Llama4ForCausalLM": USUAL,
        "Llama4ForConditionalGeneration": USUAL,
        "Ernie4_5_MoeForCausalLM": USUAL,
        "HunYuanMoEV1ForCausalLM": USUAL,
        "HYV3ForCausalLM": USUAL,
        "Dots1ForCausalLM": USUAL,
        "SolarOpenForCausalLM": USUAL,
        "ExaoneMoeForCausalLM": USUAL,
        "GraniteMoeForCausalLM": USUAL,
        "GraniteMoeSharedForCausalLM": USUAL,
        "DbrxForCausalLM": USUAL,
        "PhimoeForCausalLM": USUAL,
        "PhiMoEForCausalLM": USUAL,
        "DeepseekForCausalLM": USUAL,
        "DeepseekV2ForCausalLM": _LATENT,
        "DeepseekV3ForCausalLM": _LATENT,
        "Glm4MoeLiteForCausalLM": _LATENT,
        "SwitchTransformersForConditionalGeneration": USUAL,
    }
)
"""By the class name in ``architectures``."""


def register(described: FamilySpec, computed: Family) -> None:
    """Adds a family from outside the package, for as long as the program runs. Raises ValueError
    for an architecture that is known already."""
    DESCRIBED.register(described.architecture, described)
    FAMILIES.register(described.architecture, computed)
