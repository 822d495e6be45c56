"""The planners of the papers as they are published, beside the program's own."""
