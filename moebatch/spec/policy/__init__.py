"""A policy, and the file that keeps it."""
