"""A pass: its rows and micro-batches, what its tasks compute, and two ways through its layers."""
