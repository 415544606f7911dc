"""Checks this machine and its network for what a node needs; what it finds, and what would help."""
