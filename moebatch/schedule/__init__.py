"""Schedules as data: which tasks a pass consists of, in what order, and what each waits for."""
