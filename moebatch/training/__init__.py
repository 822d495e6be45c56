"""A whole model in memory, for what is learnt from gradients."""
