"""Reads a text with a model, and keeps beside it what is worth knowing of its routing."""
