"""Runs the real membership, placement and reservation code with a fake clock and an in-memory network."""
