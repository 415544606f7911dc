"""Benchmarks for those who work on exo-mesh; `exo-mesh bench` has those for its users."""
