"""Bytes and where they live: checkpoint files, slots for experts, pages for keys and values."""
