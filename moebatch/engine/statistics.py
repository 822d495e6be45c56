"""What an engine has done so far."""

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStatistics:
    """Counts of passes, tokens and sequences; read where progress is shown."""

    num_layers: int = 0
    layer: int = 0
    """The one, counted from 0, that began last in the pass in work."""
    num_passes: int = 0
    prompt_tokens: int = 0
    """Prompt tokens that went through the layers, those computed again included."""
    generated_tokens: int = 0
    shared_tokens: int = 0
    """Prompt tokens that had been computed for other sequences."""
    num_running: int = 0
    num_preempted: int = 0
    num_shrunk: int = 0
    """Times that passes were made smaller because the system refused memory."""
    num_grown: int = 0
    """Experts that stay in memory that the cache has given back at the end."""
