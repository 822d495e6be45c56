"""Lanes of threads and streams, and the executor that gives them the tasks of a schedule."""
