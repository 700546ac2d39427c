"""The conformance kit as a pytest plugin; imports nothing of kvferry until one of its fixtures is used."""
