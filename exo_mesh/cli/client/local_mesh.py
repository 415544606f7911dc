"""Starts a mesh of a few nodes on this machine: `exo-mesh serve` processes that share only the loopback network."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.child_node import ChildNode, ChildNodeError, ReadyNode, free_port, start_node, stop_all
from exo_mesh.errors import DeadlineError, MeshError

_JOIN_DEADLINE_S = 30.0
_POLL_S = 0.1


@dataclass
class LocalMesh:
    """The child nodes of one local mesh. children[0] is the peer that the others connect to, and the user sees its
    API."""

    children: list[ChildNode] = field(default_factory=list)

    @property
    def api_urls(self) -> list[str]:
        return [child.url for child in self.children]

    def client(self, index: int = 0) -> ApiClient:
        return self.children[index].api

    def wait_until_joined(self) -> None:
        """Wait until all nodes are ready and the first sees all others. Raises ChildNodeError or DeadlineError."""
        for child in self.children:
            child.wait_ready()
        await_joined(self.children[:1], len(self.children))


def await_joined(nodes: Sequence[ReadyNode], num_peers: int, deadline_s: float = _JOIN_DEADLINE_S) -> None:
    """Waits until each of these nodes sees so many living peers, itself included. Raises DeadlineError."""
    end = time.monotonic() + deadline_s
    waiting = list(nodes)
    while waiting:
        with contextlib.suppress(MeshError):
            if sum(peer["alive"] for peer in waiting[0].state()["view"]["peers"]) >= num_peers:
                waiting.pop(0)
                continue
        if time.monotonic() > end:
            raise DeadlineError(f"{len(waiting)} of {num_peers} nodes do not see all others after {deadline_s:g} s")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def local_mesh(num_peers: int, flags: Sequence[str], name: str, api_port: int | None = None) -> Iterator[LocalMesh]:
    """Start num_peers nodes together with `flags`, and always stop them when the context ends.

    api_port: the API port of the first peer; None means the default port. After a failure the homes of the nodes stay
    on disk, and the message gives the paths of the logs.
    """
    scratch = Path(tempfile.mkdtemp(prefix=f"exo-mesh-{name}-"))
    mesh = LocalMesh()
    try:
        _start(mesh.children, num_peers, flags, name, scratch, api_port)
        yield mesh
    except ChildNodeError:
        raise
    except MeshError as exc:
        raise MeshError("\n".join([str(exc), *(child.log_tail() for child in mesh.children)])) from exc
    finally:
        stop_all(mesh.children)
    shutil.rmtree(scratch, ignore_errors=True)


def _start(
    children: list[ChildNode], num_peers: int, flags: Sequence[str], name: str, scratch: Path, api_port: int | None
) -> None:
    meeting_port = free_port()
    for index in range(num_peers):
        own = ["--namespace", f"{name}-{os.getpid()}"]
        if index == 0:
            own += ["--grpc-port", str(meeting_port), *([] if api_port is None else ["--api-port", str(api_port)])]
        else:
            own += ["--bootstrap-peers", f"127.0.0.1:{meeting_port}"]
        without = ["--api-port"] if index == 0 else []  # it then gets the default one, or the next
        children.append(start_node(scratch / f"peer-{index + 1}", [*own, *flags], without=without))
