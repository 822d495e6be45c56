"""Tasks with start and end, predicted or measured, and what can be said of them."""
