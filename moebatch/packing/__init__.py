"""Writes smaller checkpoints, which other programs read as well."""
