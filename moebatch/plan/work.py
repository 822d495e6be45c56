"""What simulated passes may have to do."""

from typing import Literal

Work = Literal["decode", "prefill", "mean"]
"""decode: every pass is a full batch that decodes. prefill: its prompts come first, in one pass.
mean: every pass is the mean pass of the job, in which prompts mix with answers."""
