"""Shares arrays among sequences: blocks of several, and the memory of those that begin alike."""
