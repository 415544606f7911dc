"""Which nodes there are.

Doors: `membership` admits peers, finds out who is alive (SWIM) and spreads records; `discovery` suggests addresses by
UDP, mDNS, files and Tailscale.

Invariants: an address is a suggestion until its node has said hello; records change only by a higher version of their
owner; nothing here knows gRPC, so that a simulator can run hundreds of nodes in one process.

Not here: what peers do together (`rings`), and secrets (`security`).
"""
