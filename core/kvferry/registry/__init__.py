"""Which plugins there are, which of them count, and the one door through which they are asked."""
