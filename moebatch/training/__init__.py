"""Gates that learn: a whole model in memory, of which nothing else changes."""
