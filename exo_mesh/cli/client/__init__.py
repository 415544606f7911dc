"""A client of a node's HTTP API, and helpers that run nodes as child processes."""
