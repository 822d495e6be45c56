"""What survives a run: finished rows, unfinished answers, and who is writing them."""
