"""exo-mesh runs one language model over the machines that you already own."""

import sys

__version__ = "0.1.0"

OLDEST_PYTHON = (3, 11)


def python_fault(version: tuple[int, ...]) -> str:
    """Says what to do if this Python is too old; "" if it is not. pip checks the version, a copied source tree does
    not."""
    if version[:2] >= OLDEST_PYTHON:
        return ""
    needed, found = ".".join(map(str, OLDEST_PYTHON)), ".".join(map(str, version[:3]))
    return f"exo-mesh needs Python {needed} or newer, but this is Python {found}: install a newer one first"


if fault := python_fault(tuple(sys.version_info[:3])):
    sys.exit(fault)

PROTOCOL_VERSION = 5
"""Newest version of the peer-to-peer protocol (control and data plane) that this package speaks."""

OLDEST_PROTOCOL = 4
"""Oldest version of the protocol that this package still speaks. Two peers fit together if their ranges overlap;
docs/reference/protocol.md says what may change within a version, and when these two numbers rise."""
