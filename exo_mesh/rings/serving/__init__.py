"""One request: find its ring, follow it to its end, keep what is needed to continue."""
