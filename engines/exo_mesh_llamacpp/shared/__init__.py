"""Sequences that begin alike, in cells that they have in common."""
