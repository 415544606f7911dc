"""Fetches models for this node: requests, sources, disk space and records."""
