"""Rooflines, Gantt charts and traces."""
