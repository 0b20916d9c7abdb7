"""The command line. Heavy imports happen inside commands, so that `kvprobe --help` answers at once."""

from kvprobe.cli.entry import app, main

__all__ = ["app", "main"]
