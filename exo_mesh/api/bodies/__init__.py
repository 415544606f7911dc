"""Limits for the bodies of requests: how many values they have, and how many are held in memory at once."""
