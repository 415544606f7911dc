"""Drafts: guesses of the next tokens that are computed together with the last known one, and judged by the driver."""
