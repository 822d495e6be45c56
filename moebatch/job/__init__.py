"""Runs, checks, plans and calibrates: what the commands of the program do."""
