"""Arithmetic for which torch has nothing fast enough: C, compiled at first use on this machine."""
