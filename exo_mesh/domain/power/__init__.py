"""Power of machines, and energy per token. Pure values and arithmetic."""
