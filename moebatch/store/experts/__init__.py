"""Experts where they live and where they are computed, in slots or in pages."""
