"""Logging, Prometheus metrics, and plain tables."""
