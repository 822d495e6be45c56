"""Runs, checks and plans: what the commands of the program do."""
