"""What machines draw, and what a token costs. Pure values and arithmetic."""
