"""Which architectures of transformers the torch engine splits: tiny models of many families, and the table of results."""
