"""``kvferry demo``: a context and a generation worker, driven over HTTP as a router would, and checked."""
