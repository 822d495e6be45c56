"""All families."""

from moebatch.registry import Registry
from moebatch.spec.families.afmoe import AFMOE
from moebatch.spec.families.aria import ARIA, ARIA_TEXT
from moebatch.spec.families.cohere import COHERE2_MOE
from moebatch.spec.families.dbrx import DBRX
from moebatch.spec.families.deepseek import (
    AXK1,
    DEEPSEEK_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
)
from moebatch.spec.families.deepseek_v4 import DEEPSEEK_V4
from moebatch.spec.families.ernie import ERNIE_4_5_MOE
from moebatch.spec.families.flint import FLINT
from moebatch.spec.families.gemma import GEMMA4, GEMMA4_TEXT
from moebatch.spec.families.glm import DOTS1, EXAONE_MOE, GLM4_MOE, GLM4V_MOE, SOLAR_OPEN
from moebatch.spec.families.gpt_oss import GPT_OSS
from moebatch.spec.families.granite import (
    GRANITE_MOE,
    GRANITE_MOE_HYBRID,
    GRANITE_MOE_SHARED,
    GRANITE_MOE_SWA,
)
from moebatch.spec.families.hunyuan import HUNYUAN_V1_MOE, HY_V3
from moebatch.spec.families.kimi import KIMI_LINEAR
from moebatch.spec.families.kolibri import KOLIBRI
from moebatch.spec.families.laguna import LAGUNA
from moebatch.spec.families.lara import LARA_MINI
from moebatch.spec.families.lfm2 import LFM2_MOE
from moebatch.spec.families.ling import BAILING_HYBRID, BAILING_MOE_V3
from moebatch.spec.families.llama import LLAMA4, LLAMA4_TEXT
from moebatch.spec.families.longcat import LONGCAT_FLASH
from moebatch.spec.families.mimo import MIMO_V2_FLASH
from moebatch.spec.families.minimax import MINIMAX, MINIMAX_M1, MINIMAX_M2, MINIMAX_TEXT_01
from moebatch.spec.families.mistral import MISTRAL3, MISTRAL4
from moebatch.spec.families.mixtral import MIXTRAL
from moebatch.spec.families.nemotron import NEMOTRON_H
from moebatch.spec.families.olmoe import FLEX_OLMO, OLMOE
from moebatch.spec.families.phimoe import PHIMOE, RELEASED_PHIMOE
from moebatch.spec.families.qwen import (
    MELLUM,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_OMNI_MOE,
    QWEN3_OMNI_THINKER,
    QWEN3_VL_MOE,
)
from moebatch.spec.families.qwen_delta import QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_NEXT
from moebatch.spec.families.sarvam import SARVAM_MLA, SARVAM_MOE
from moebatch.spec.families.step import STEP3P5, STEP3P7
from moebatch.spec.families.switch import SWITCH_TRANSFORMERS

_SPARSE = (DEEPSEEK_V32, GLM_MOE_DSA)
_LATENT = (DEEPSEEK_V2, DEEPSEEK_V3, *_SPARSE, GLM4_MOE_LITE, AXK1, MISTRAL4, MISTRAL3)
_DEEPSEEK = (DEEPSEEK_MOE, *_LATENT)
_QWEN = (QWEN2_MOE, QWEN3_MOE, QWEN3_VL_MOE, QWEN3_NEXT, QWEN3_5_MOE_TEXT, QWEN3_5_MOE)
_GRANITE = (GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_MOE_SWA, GRANITE_MOE_HYBRID)
_OTHERS = (
    OLMOE,
    FLEX_OLMO,
    AFMOE,
    MELLUM,
    LFM2_MOE,
    NEMOTRON_H,
    KIMI_LINEAR,
    BAILING_HYBRID,
    BAILING_MOE_V3,
    QWEN3_OMNI_THINKER,
    QWEN3_OMNI_MOE,
    ARIA_TEXT,
    ARIA,
    KOLIBRI,
    FLINT,
    LARA_MINI,
    LONGCAT_FLASH,
    GLM4_MOE,
    GLM4V_MOE,
    MINIMAX,
    MINIMAX_TEXT_01,
    MINIMAX_M1,
    MINIMAX_M2,
    MIMO_V2_FLASH,
    STEP3P5,
    STEP3P7,
    DEEPSEEK_V4,
    LAGUNA,
    COHERE2_MOE,
    DBRX,
    GPT_OSS,
    *_GRANITE,
    ERNIE_4_5_MOE,
    HUNYUAN_V1_MOE,
    HY_V3,
    DOTS1,
    SOLAR_OPEN,
    SARVAM_MOE,
    SARVAM_MLA,
    EXAONE_MOE,
    GEMMA4_TEXT,
    GEMMA4,
    LLAMA4_TEXT,
    LLAMA4,
    SWITCH_TRANSFORMERS,
    PHIMOE,
    RELEASED_PHIMOE,
)
_KNOWN = (MIXTRAL, *_QWEN, *_DEEPSEEK, *_OTHERS)
FAMILIES = Registry({family.architecture: family for family in _KNOWN})
"""By the class name in ``architectures``. A family from outside the package is added by
`moebatch.model.families.registry.register`."""
