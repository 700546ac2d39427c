"""What the handshake of two workers would say, before they are started."""
