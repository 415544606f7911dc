"""Shares the memory of sequences that begin alike."""
