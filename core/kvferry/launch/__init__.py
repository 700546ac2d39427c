"""Worker processes: each on its own, or all of one world by one command, with the same interface."""
