"""exo-mesh: one language model over the machines you already own."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 4
"""Version of the peer-to-peer protocol (control and data plane); peers with another version are refused politely."""
