"""Benchmarks of a ring, of the engines, and of a whole mesh, on this machine."""
