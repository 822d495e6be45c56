"""Passes over the layers: which tokens, in what order, on which lanes. Knows token ids only."""
