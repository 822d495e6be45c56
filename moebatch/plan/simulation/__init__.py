"""Schedules on lanes with a virtual clock, at the prices of the planner."""
