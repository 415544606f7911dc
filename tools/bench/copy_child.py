"""A child process of `python -m tools.bench copy`: one end of a copy. Ends when its standard input closes.

serve DIRECTORY     our file server, which prints its port
plain FILE          sends a file by socket.sendfile to everybody who connects; prints its port
read SOURCE TARGET  our client: copies a file again and again; prints the bytes so far after each copy
"""

from __future__ import annotations

import argparse
import datetime
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from exo_mesh.models.fetcher.peer_source import open_peer
from exo_mesh.models.fetcher.wire import Source, Tls
from exo_mesh.models.file_server.pace import CopyPace
from exo_mesh.models.file_server.server import FileServer
from exo_mesh.security.certificates import issue
from exo_mesh.security.credentials import Credentials

MODEL, FILE, DIGEST = "bench/copy", "model.safetensors", "bench"


def credentials(secret: str) -> Credentials | None:
    """Credentials of a mesh with this secret; None for an open mesh."""
    return issue(secret, "bench", ["127.0.0.1"], datetime.datetime.now(datetime.UTC)) if secret else None


def tls_of(own: Credentials | None) -> Tls | None:
    return own and Tls(own.authority.decode(), own.certificate.decode(), own.private_key.decode())


def source_at(port: int) -> Source:
    return Source("bench", (f"http://127.0.0.1:{port}",))


def copy_once(
    port: int,
    size: int,
    target: Path,
    tls: Tls | None,
    *,
    is_busy: bool = False,
    count: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Reads the file as a fetcher does, and writes it to `target`."""
    model = open_peer(source_at(port), MODEL, tls, pace=CopyPace(lambda: is_busy))
    try:
        with target.open("wb", buffering=0) as stream:
            model.read(FILE, 0, size, lambda piece: count(stream.write(piece) or 0))
    finally:
        model.close()


def serve(args: argparse.Namespace, secret: str) -> None:
    found = {MODEL: (args.place, DIGEST)}
    server = FileServer(found.get, credentials(secret), is_busy=lambda: bool(args.busy))
    print(server.start("127.0.0.1", 0), flush=True)
    sys.stdin.read()
    server.stop()


def plain(args: argparse.Namespace, _: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)

    def send_all() -> None:
        while True:
            sock, _ = listener.accept()
            with sock, args.place.open("rb") as stream:
                sock.sendfile(stream)

    threading.Thread(target=send_all, daemon=True).start()
    sys.stdin.read()


def read(args: argparse.Namespace, secret: str) -> None:
    tls, total = tls_of(credentials(secret)), 0

    def count(num_bytes: int) -> None:
        nonlocal total
        total += num_bytes

    def read_all() -> None:
        while True:
            copy_once(args.port, args.size, args.place, tls, is_busy=args.busy, count=count)

    threading.Thread(target=read_all, daemon=True).start()
    sys.stdin.read()
    print(total, flush=True)
    os._exit(0)  # the thread goes on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("serve", "plain", "read"))
    parser.add_argument("place", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--busy", action="store_true")
    args = parser.parse_args()
    {"serve": serve, "plain": plain, "read": read}[args.what](args, sys.stdin.readline().strip())


if __name__ == "__main__":
    main()
