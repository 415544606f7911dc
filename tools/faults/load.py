"""Clients that ask one counting question after the other, as behind a load balancer."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from exo_mesh.errors import MeshError
from tools.faults.mesh import Node
from tools.faults.stream import Stream, counting

NOBODY_S = 60.0
"""How long all peers may be unready at once."""

REFUSED = ("not_ready", "node_stopping", "no_node")
"""Before the first byte a balancer asks the next peer: this one drains or stops, or has gone since it was ready."""


class Clients:
    """`count` threads; each asks again as soon as it has its answer, until `stop`. Only whole answers are in `answers`.

    peers: those that may be asked. A client asks one that says it is ready, a random one each time.
    """

    def __init__(self, peers: Sequence[Node], count: int, seed: int) -> None:
        self.answers: list[Stream] = []
        self.failure = ""
        """The first error or wrong text that a client saw."""
        self._peers = list(peers)
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + number),), daemon=True, name="client")
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def await_answers(self, more: int, deadline_s: float = 180.0) -> None:
        """Wait until so many more have come. Raises AssertionError if a client saw an error, or it takes too long."""
        wanted = len(self.answers) + more
        with self._changed:
            come = self._changed.wait_for(lambda: len(self.answers) >= wanted or self.failure, deadline_s)
        assert not self.failure, self.failure
        assert come, f"not {more} answers within {deadline_s:g} s: the mesh is wedged"

    def stop(self) -> None:
        """Let every client have its last answer. Raises AssertionError as above."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(180)
        assert not any(thread.is_alive() for thread in self._threads), "a client waits for ever"
        assert not self.failure, self.failure

    def _run(self, rng: random.Random) -> None:
        while not self._stopping.is_set() and not self.failure:
            first = rng.randrange(10, 120)
            stream = self._ask(rng, first, first + rng.randrange(5, 40))
            with self._changed:
                if stream is None:
                    self.failure = self.failure or f"nobody was ready for {NOBODY_S:g} s"
                elif not stream.is_right:
                    self.failure = self.failure or f"{stream.outcome} {stream.message} after {stream.text!r}"
                else:
                    self.answers.append(stream)
                self._changed.notify_all()

    def _ask(self, rng: random.Random, first: int, last: int) -> Stream | None:
        """One answer, right or not, from a peer that takes the request; None if none does."""
        patience = threading.Event()
        for _ in range(int(NOBODY_S / 0.1)):
            node = rng.choice(self._peers)
            if is_ready(node):
                stream = Stream(node, counting(first, last))
                stream.ended.wait(180)
                if stream.error not in REFUSED or stream.pieces:
                    return stream
            patience.wait(0.1)
        return None


def is_ready(node: Node) -> bool:
    """What a balancer asks before it sends a request there."""
    try:
        return bool(node.serves and node.api.get("/readyz", 2.0)["ready"])
    except MeshError:
        return False
