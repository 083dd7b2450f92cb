"""Find the bugs of a DDP script that give no error, by running it unchanged."""
