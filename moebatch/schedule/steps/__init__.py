"""What schedules have in common: attention of a step, keys and values, weights in pages."""
