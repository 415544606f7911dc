"""Which architectures of transformers the torch engine splits: tiny models of many families, and a table."""
