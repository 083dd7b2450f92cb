"""Find the bugs of a DDP script that give no error, by running it unchanged."""

__version__ = "0.2"
