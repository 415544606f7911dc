"""The real membership, placement and reservation code in a world made of a fake clock and an in-memory network."""
