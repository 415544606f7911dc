"""Checks what a node needs on this machine and its network; reports findings and remedies."""
