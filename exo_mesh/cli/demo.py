"""Start a small mesh on this machine, ask the demo model a question, and keep serving until Ctrl-C.

Each peer is a real `exo-mesh serve` process with a home of its own; they share nothing but the loopback network.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.child_node import ChildNode, ChildNodeError
from exo_mesh.cli.client import ApiClient
from exo_mesh.cli.screen import DEMO_MODEL, FIRST_QUESTION
from exo_mesh.config import ConfigError
from exo_mesh.errors import DeadlineError, MeshError

if TYPE_CHECKING:
    from exo_mesh.cli.demo_screen import DemoScreen

_START_DEADLINE_S = 60.0
_JOIN_DEADLINE_S = 30.0
_LOAD_DEADLINE_S = 300.0
_POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--peers`, `--question`, `--once`, `--engine`."""
    parser.add_argument("--peers", type=int, default=2, metavar="N", help="how many peers (2)")
    parser.add_argument("--question", default=FIRST_QUESTION, metavar="TEXT", help=f"what to ask ({FIRST_QUESTION})")
    parser.add_argument("--once", action="store_true", help="stop after the answer")
    parser.add_argument("--engine", default="mlx", metavar="NAME", help="engine of every peer (mlx)")


def run(args: argparse.Namespace) -> int:
    """Start, ask, serve. Whatever happens, no child is left behind."""
    from exo_mesh.cli.demo_screen import DemoScreen

    if not 1 <= args.peers <= 8:
        raise ConfigError(f"--peers {args.peers}: a whole number from 1 to 8 is needed")
    _require_engine(args.engine)
    scratch = Path(tempfile.mkdtemp(prefix="exo-mesh-demo-"))
    children: list[ChildNode] = []
    with _termination_as_interrupt():
        try:
            _start(children, scratch, args)
            code = _demonstrate(children, args, DemoScreen())
        except KeyboardInterrupt:
            code = exit_codes.INTERRUPTED
        except ChildNodeError:
            raise
        except MeshError as exc:
            raise MeshError("\n".join([str(exc), *(child.log_tail() for child in children)])) from exc
        finally:
            _stop(children)
    shutil.rmtree(scratch, ignore_errors=True)  # kept after a failure: the message says where the logs are
    return code


def _require_engine(name: str) -> None:
    """Raises ConfigError with what to install if the engine cannot run here."""
    from exo_mesh.engine.registry import load_registry

    registry = load_registry()
    if name in registry.broken:
        raise ConfigError(f"the engine {name} does not import: {registry.broken[name]}")
    if name not in registry.providers:
        raise ConfigError(f"--engine {name}: not installed; there is {', '.join(sorted(registry.providers)) or 'none'}")
    look = registry.providers[name].availability()
    if not look.available:
        raise ConfigError(f"the demo needs the engine {name}: {look.reason}. {look.remedy}".rstrip())


def _start(children: list[ChildNode], scratch: Path, args: argparse.Namespace) -> None:
    """Start all peers at once; the first is the one whose API is shown, and the one that the others dial."""
    meeting_port = _free_port()
    environ = {key: value for key, value in os.environ.items() if not key.startswith("EXO_MESH_")}
    for index in range(args.peers):
        home = scratch / f"peer-{index + 1}"
        home.mkdir()
        flags = ["--home", str(home), "--name", f"peer-{index + 1}", "--host", "127.0.0.1", "--engine", args.engine]
        flags += ["--discovery", "none", "--namespace", f"demo-{os.getpid()}"]
        if index == 0:
            flags += ["--grpc-port", str(meeting_port)]
        else:
            flags += ["--grpc-port", "0", "--api-port", "0", "--bootstrap-peers", f"127.0.0.1:{meeting_port}"]
        children.append(ChildNode(flags, home / "node.log", environ))


def _demonstrate(children: list[ChildNode], args: argparse.Namespace, screen: DemoScreen) -> int:
    with screen.waiting(f"starting {args.peers} peers"):
        ready = [child.wait_ready(_START_DEADLINE_S) for child in children]
        client = ApiClient(ready[0]["api_url"])
        _await_peers(client, args.peers)
    with screen.waiting(f"loading {DEMO_MODEL} over {args.peers} peers"):
        body = {"model": DEMO_MODEL, "min_peers": args.peers, "engine": args.engine}
        instance = client.post("/instance", body, _LOAD_DEADLINE_S)
    screen.ring(instance, client.get("/state"))
    screen.answer(client, args.question)
    if args.once:
        return exit_codes.OK
    screen.serving([event["api_url"] for event in ready])
    return _serve(children, screen)


def _await_peers(client: ApiClient, num_peers: int) -> None:
    """Until the first peer sees all others. Raises DeadlineError."""
    end = time.monotonic() + _JOIN_DEADLINE_S
    while time.monotonic() < end:
        peers = client.get("/state")["view"]["peers"]
        if sum(peer["alive"] for peer in peers) >= num_peers:
            return
        time.sleep(_POLL_S)
    raise DeadlineError(f"the peers did not find each other within {_JOIN_DEADLINE_S:g} s")


def _serve(children: list[ChildNode], screen: DemoScreen) -> int:
    """Until Ctrl-C. A peer that ends is told; the others go on."""
    alive = list(children)
    try:
        while alive:
            for child in [child for child in alive if not child.alive]:
                alive.remove(child)
                screen.peer_ended(children.index(child) + 1, child.log_tail())
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        screen.stopping()
        return exit_codes.OK
    return exit_codes.FAILED


def _stop(children: list[ChildNode]) -> None:
    for child in children:
        child.ask_to_stop()
    for child in children:
        child.stop()


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before: Mapping[signal.Signals, Any] = {
        signum: signal.signal(signum, interrupt) for signum in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
