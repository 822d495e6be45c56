"""Rows of an input as prompts, outcomes as lines of an output. Of a model it knows the tokens."""
