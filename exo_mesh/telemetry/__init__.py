"""Logs, metrics and readings."""
