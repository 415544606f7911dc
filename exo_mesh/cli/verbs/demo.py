"""Start a small mesh on this machine, ask a model a question, and keep serving until Ctrl-C.

The peers are real nodes. Their homes are temporary and are deleted at the end, so there is no --home; other verbs find
the first peer by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exo_mesh.base.printable import counted
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.local_mesh import LocalMesh, local_mesh
from exo_mesh.cli.model_paths import existing_path, is_path, models_dir_for
from exo_mesh.cli.screen import DEMO_MODEL, FIRST_QUESTION
from exo_mesh.errors import InputError, MeshError, ModelError, PlacementError
from exo_mesh.security.local_token import read_token
from exo_mesh.settings.config import ConfigError
from exo_mesh.settings.default_paths import models_dirs
from exo_mesh.settings.loading import load_settings
from exo_mesh.weights.store import ModelStore

if TYPE_CHECKING:
    from exo_mesh.cli.demo_screen import DemoScreen

_LOAD_DEADLINE_S = 300.0
_POLL_S = 0.1
_REFUSALS = (InputError, ModelError, PlacementError)
"""What a node answers about a model that it cannot run, or a question that it cannot take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--model`, `--peers`, `--question`, `--once`, `--engine`, `--api-port`."""
    parser.add_argument(
        "--model", metavar="PATH", help=f"a GGUF file, a model's folder, or a model on this machine ({DEMO_MODEL})"
    )
    parser.add_argument("--peers", type=int, default=2, metavar="N", help="how many peers (2)")
    parser.add_argument("--question", default=FIRST_QUESTION, metavar="TEXT", help=f"the question ({FIRST_QUESTION})")
    parser.add_argument("--once", action="store_true", help="stop after the answer")
    parser.add_argument(
        "--engine", default="auto", metavar="NAME", help="engine of every peer (by default the best one here)"
    )
    parser.add_argument(
        "--api-port", type=int, metavar="PORT", help="API port of the first peer; 0 = any free one (52415, or the next)"
    )


def run(args: argparse.Namespace) -> int:
    """Starts the mesh, asks the question, serves. All child processes end, however this ends."""
    from exo_mesh.cli.demo_screen import DemoScreen

    return demonstrate(args, DemoScreen())


def demonstrate(args: argparse.Namespace, screen: DemoScreen) -> int:
    """Does what `run` does and shows it on a screen; a recorder of the terminal brings its own."""
    if not 1 <= args.peers <= 8:
        raise ConfigError(f"--peers {args.peers}: a whole number from 1 to 8 is needed")
    wanted, args.engine = args.engine, _usable_engine(args.engine)
    if args.api_port is not None and not 0 <= args.api_port <= 65535:
        raise ConfigError(f"--api-port {args.api_port}: a whole number from 0 to 65535 is needed")
    flags = ["--engine", wanted]  # not the engine of the demo model: "auto" runs other formats, such as GGUF, too
    if args.model is not None:
        args.engine = wanted
        path = _own_model(args.model)
        args.model, flags = str(path), [*flags, "--models-dir", str(models_dir_for(path))]
    with _termination_as_interrupt(), local_mesh(args.peers, flags, "demo", args.api_port) as mesh:
        try:
            return _demonstrate(mesh, args, screen)
        except KeyboardInterrupt:
            return exit_codes.INTERRUPTED
        except _REFUSALS as exc:
            refusal = exc  # an answer of the mesh: its logs would not add to it
    raise refusal


def _own_model(text: str) -> Path:
    """The place of a model that is named by its path or, on this machine, by its name. Raises UnknownModelError."""
    if is_path(text):
        return existing_path(text)
    settings = load_settings({}, os.environ).settings
    return ModelStore(models_dirs(settings, os.environ)).find(text)


def _usable_engine(name: str) -> str:
    """The engine of that name, or for "auto" the best one here. Raises ConfigError that says what to install."""
    from exo_mesh.engine.registry import load_registry

    try:
        return load_registry().choose(name).name
    except MeshError as exc:
        raise ConfigError(f"--engine {name}: {exc}") from exc


def _demonstrate(mesh: LocalMesh, args: argparse.Namespace, screen: DemoScreen) -> int:
    with screen.waiting(f"starting {counted(args.peers, 'peer')}"):
        mesh.wait_until_joined()
    client = mesh.client()
    asked = args.model or DEMO_MODEL
    with screen.waiting(f"loading {Path(asked).name} over {counted(args.peers, 'peer')}"):
        body = {"model": asked, "min_peers": args.peers, **({} if args.engine == "auto" else {"engine": args.engine})}
        instance = client.post("/instance", body, _LOAD_DEADLINE_S)
    screen.ring(instance, client.get("/state"))
    screen.answer(client, instance["model"], args.question)
    if args.once:
        return exit_codes.OK
    return _serve(mesh, screen, instance["model"])


def _serve(mesh: LocalMesh, screen: DemoScreen, model: str) -> int:
    """Serves until Ctrl-C. Reports each peer that ends while the others keep running; fails when all have ended."""
    alive = list(mesh.children)
    try:
        token = read_token(Path(mesh.children[0].ready["home"]))
        screen.serving(mesh.api_urls, model, token)  # a reader may press Ctrl-C as soon as this is shown
        while alive:
            for child in [child for child in alive if not child.alive]:
                alive.remove(child)
                screen.peer_ended(mesh.children.index(child) + 1, child.log_tail())
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        screen.stopping()
        return exit_codes.OK
    return exit_codes.FAILED


@contextlib.contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does."""

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
