"""Running answers: read again by their owner, in the dialect of their request, and stopped."""
