"""The KV-cache managers."""
