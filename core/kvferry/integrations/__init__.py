"""Host engines on top of kvferry."""
