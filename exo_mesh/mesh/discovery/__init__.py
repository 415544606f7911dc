"""Finds addresses of other nodes. Discovery only suggests; the membership admits."""
