"""A model as its configuration describes it: shapes, sizes, tensors. No weights, no torch."""
