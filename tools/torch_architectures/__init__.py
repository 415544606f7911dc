"""Finds the architectures of transformers that the torch engine splits: tiny models of many families, and a table."""
