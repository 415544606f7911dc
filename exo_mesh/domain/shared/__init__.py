"""Values that every peer may change and the whole mesh holds."""
