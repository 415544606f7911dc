"""Benchmarks for developers of exo-mesh; `exo-mesh bench` has those for users."""
