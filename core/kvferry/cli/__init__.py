"""The kvferry command."""
