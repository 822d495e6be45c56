"""Families of models: what of ``config.json`` describes one, and how its tensors are named."""
