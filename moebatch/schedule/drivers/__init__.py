"""What runs a schedule: a driver on any lanes, a virtual clock for it, and one that only counts."""
