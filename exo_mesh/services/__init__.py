"""The service of a node: what systemd and launchd need, and how it is put there."""
