"""Writes the documentation that the code itself is the source of; ``make generated`` runs it."""
