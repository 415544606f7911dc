"""Clients that ask one counting question after the other, as behind a load balancer."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from exo_mesh.errors import MeshError
from tools.faults.client_threads import ClientThreads
from tools.faults.mesh import Node
from tools.faults.stream import Question, Stream, random_counting

NOBODY_S = 60.0
"""How long all peers may be unready at once."""

REFUSED = ("not_ready", "node_stopping", "no_node")
"""Errors before the first byte after which a balancer asks the next peer: it drains or stops, or is gone since it was
ready."""


class Clients(ClientThreads[Stream]):
    """Clients that send a request once.

    peers: the peers to ask. A client asks a random peer that reports itself ready.
    """

    def __init__(self, peers: Sequence[Node], count: int, seed: int) -> None:
        self._peers = list(peers)
        super().__init__(count, seed)

    def ask(self, rng: random.Random, number: int) -> Stream | str:
        stream = self._ask(rng, random_counting(rng))
        if stream is None:
            return f"nobody was ready for {NOBODY_S:g} s"
        return stream if stream.is_right else f"{stream.outcome} {stream.message} after {stream.text!r}"

    def _ask(self, rng: random.Random, question: Question) -> Stream | None:
        """Gets one answer, right or not, from a peer that accepts the request; None if none does."""
        patience = threading.Event()
        for _ in range(int(NOBODY_S / 0.1)):
            node = rng.choice(self._peers)
            if is_ready(node):
                stream = Stream(node, question)
                stream.ended.wait(180)
                if stream.error not in REFUSED or stream.pieces:
                    return stream
            patience.wait(0.1)
        return None


def is_ready(node: Node) -> bool:
    """Checks a peer as a balancer does before it sends a request there."""
    try:
        return bool(node.serves and node.api.get("/readyz", 2.0)["ready"])
    except MeshError:
        return False
