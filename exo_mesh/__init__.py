"""exo-mesh: one language model over the machines you already own."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 5
"""Newest version of the peer-to-peer protocol (control and data plane) that this package speaks."""

OLDEST_PROTOCOL = 4
"""Oldest version that it still speaks. Two peers fit together if their ranges overlap; docs/protocol.md says what may
change within a version, and when these two numbers rise."""
