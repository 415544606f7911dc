"""Writes the configuration of a proxy in front of all nodes, from the state of the live mesh."""
