"""The configuration of a proxy in front of all nodes, from what the live mesh looks like."""
