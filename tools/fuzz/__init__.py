"""Sends malformed messages to real nodes, and reports the effects."""
