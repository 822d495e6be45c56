"""Rows of an input as prompts, and outcomes as lines of an output. Knows no model but its tokens."""
