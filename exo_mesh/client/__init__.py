"""A client of the HTTP API of nodes, and nodes that are child processes of their caller."""
