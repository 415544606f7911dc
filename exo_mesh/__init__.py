"""exo-mesh: one language model over the machines you already own."""

import sys

__version__ = "0.1.0"

OLDEST_PYTHON = (3, 11)


def python_fault(version: tuple[int, ...]) -> str:
    """A sentence about a Python that is too old; "" if it is not. pip looks at this, a copied source tree does not."""
    if version[:2] >= OLDEST_PYTHON:
        return ""
    needed, said = ".".join(map(str, OLDEST_PYTHON)), ".".join(map(str, version[:3]))
    return f"exo-mesh needs Python {needed} or newer, and this is Python {said}: install a newer one first"


if fault := python_fault(tuple(sys.version_info[:3])):
    sys.exit(fault)

PROTOCOL_VERSION = 5
"""Newest version of the peer-to-peer protocol (control and data plane) that this package speaks."""

OLDEST_PROTOCOL = 4
"""Oldest version that it still speaks. Two peers fit together if their ranges overlap; docs/reference/protocol.md says
what may change within a version, and when these two numbers rise."""
