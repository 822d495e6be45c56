"""The command line. Each command: parse, call, render, exit code; what it does is done below."""

from moebatch.cli.commands import app, main

__all__ = ["app", "main"]
