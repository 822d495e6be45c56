"""Rows in, rows out: reading the input, making requests of it, writing the answers."""
