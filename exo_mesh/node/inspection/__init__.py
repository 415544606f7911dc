"""Troubleshooting of this node and of all others: diagnostics, traces and captures."""
