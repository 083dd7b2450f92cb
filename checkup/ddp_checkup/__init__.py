"""Runs a DDP script unchanged, and reports bugs that give no error."""

__version__ = "0.3"
