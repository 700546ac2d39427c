"""Measuring ourselves against the raw transport, in one run."""
