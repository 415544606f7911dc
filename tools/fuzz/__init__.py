"""Throws malformed messages at real nodes, and says what it did to them."""
