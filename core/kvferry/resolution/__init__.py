"""From what the user wrote to what a deployment gets: pure, no I/O."""
