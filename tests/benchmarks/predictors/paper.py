"""How fast an emulated link has to be for experts to weigh as much as on ProMoE's machine.

An expert of the built-in model moves in microseconds, one of DeepSeek-MoE-16B (DS-1) in most of a
millisecond. What decides over a schedule is neither, but how many layers can be computed meanwhile.
"""

SECONDS_PER_TOKEN = 67.9e-3
"""ProMoE, DS-1 in 16 bits, half of the experts cached, one sequence, RTX 4090."""
OF_THESE_FETCHING = 58.1e-3
NUM_LAYERS = 28
EXPERT_BYTES = 3 * 2048 * 1408 * 2
LINK_RATE = 23.9e9

LAYER_S = (SECONDS_PER_TOKEN - OF_THESE_FETCHING) / NUM_LAYERS
"""Of everything but waiting for experts."""
TRANSFER_S = EXPERT_BYTES / LINK_RATE
TRANSFER_RATIO = TRANSFER_S / LAYER_S
"""Layers that can be computed while one expert comes: 2.07."""
