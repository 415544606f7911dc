"""Cuts a tiny random model of every architecture of mlx-lm at every legal cut, and compares the bits with the whole."""
