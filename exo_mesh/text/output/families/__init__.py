"""Readers of tool calls, one for each format that a family of models uses."""
