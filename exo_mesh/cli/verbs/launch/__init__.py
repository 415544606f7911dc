"""Start a coding agent that uses the mesh: `launch claude`, `launch opencode -- run "Explain this project"`.

The agent gets the address, a key, the name of a model and the size of its context for this run only: no file of yours
is changed, and all that was made for the run is removed when the agent ends. Words after -- go to the agent.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import ssl
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient, NoNodeError
from exo_mesh.cli.parser import Parser, add_api_flags
from exo_mesh.cli.tables import complain, fitted, line_width, say
from exo_mesh.cli.verbs.launch.agents import AGENTS, Agent, AgentSetup, LaunchTarget
from exo_mesh.cli.verbs.launch.mesh_access import LaunchModel, find_launch_model, revoke_key, take_key
from exo_mesh.cli.verbs.launch.running import run_agent, unwinding
from exo_mesh.cli.verbs.launch.workspace import Workspace, remove_abandoned
from exo_mesh.errors import InputError, MeshError
from exo_mesh.settings.config import home_of
from exo_mesh.settings.loading import load_settings

_FOLDER = "launch"
_BUNDLE = "certificates.pem"
_SHOWN_KEY = "KEY-MADE-FOR-THE-RUN"
_SHOWN_FOLDER = Path("DIRECTORY-OF-THE-RUN")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds AGENT, `--model`, `--print`, `--api-url`, `--home`, and words after `--`."""
    text = f"one of {', '.join(AGENTS)}; without it, list them"
    parser.add_argument("agent", metavar="AGENT", nargs="?", choices=list(AGENTS), help=text)
    parser.add_argument("--model", metavar="MODEL", default="", help="model to use; by default the only loaded one")
    parser.add_argument("--print", action="store_true", help="print what would be set and run, and start nothing")
    add_api_flags(parser, json=False)
    if isinstance(parser, Parser):  # a completion script is made with a plain parser
        parser.rest = "arguments"


def run(args: argparse.Namespace) -> int:
    """Runs the agent; returns its exit code."""
    if args.agent is None:
        print(_listed())
        return exit_codes.OK
    agent = AGENTS[args.agent]
    if args.print:
        client = ApiClient(args.api_url, args.home)
        print(_shown(agent, client, find_launch_model(client, args.model), args.arguments))
        return exit_codes.OK
    program = shutil.which(agent.program)
    if program is None:
        raise InputError(f"{agent.title} is not installed: there is no {agent.program} on the PATH; {agent.install}")
    root = (Path(args.home) if args.home else home_of(os.environ)) / _FOLDER
    with unwinding(), _node(args) as client:
        _clean_up(root, client)
        model = find_launch_model(client, args.model)
        _tell(agent, client, model)
        workspace = Workspace.create(root)
        try:
            if bundle := certificates(client.url, client.certificate):
                workspace.write({_BUNDLE: bundle})
            return _run_once(agent, program, client, model, workspace, args.arguments)
        finally:
            workspace.remove()


@contextlib.contextmanager
def _node(args: argparse.Namespace) -> Iterator[ApiClient]:
    """A client of the node at --api-url; if none was named and none answers, of a node that is started for this run."""
    client = ApiClient(args.api_url, args.home)
    try:
        client.get("/healthz")
    except NoNodeError:
        if args.api_url or os.environ.get("EXO_MESH_API_URL"):
            raise
    else:
        yield client
        return
    from exo_mesh.cli.verbs.run import own_node  # with the chat, whose imports take a while

    flags = {"home": [args.home]} if args.home else {}
    with own_node(flags, args.model, load_settings(flags, os.environ).settings, "this run") as client:
        yield client


def _run_once(
    agent: Agent, program: str, client: ApiClient, model: LaunchModel, workspace: Workspace, arguments: list[str]
) -> int:
    """Make the key and the files of a run, run, and revoke the key."""
    key = take_key(client)
    try:
        if key.id:
            workspace.record(client.url, key.id)
        target = LaunchTarget(client.url, key.text, model.name, model.context_tokens, workspace.path)
        setup = agent.setup(target)
        workspace.write(setup.files)
        environ = agent_environ(os.environ, setup, client.url)
        if (bundle := workspace.path / _BUNDLE).exists():
            environ |= {"NODE_EXTRA_CA_CERTS": str(bundle), "SSL_CERT_FILE": str(bundle)}
        return run_agent([program, *setup.arguments, *arguments], environ, workspace.lock)
    finally:
        if key.id and not revoke_key(client, key.id):
            complain(
                f"the key {key.id} of this run could not be revoked; `exo-mesh key remove {key.id}` on a node does it"
            )


def agent_environ(environ: Mapping[str, str], setup: AgentSetup, url: str) -> dict[str, str]:
    """The environment of the agent. No proxy is used for the node, which a proxy often cannot reach."""
    kept = {name: text for name, text in environ.items() if name not in setup.unset}
    host = urllib.parse.urlsplit(url).hostname or ""
    for name in ("NO_PROXY", "no_proxy"):
        kept[name] = ",".join(filter(None, [kept.get(name, ""), host]))
    return {**kept, **setup.environ}


def _clean_up(root: Path, client: ApiClient) -> None:
    """Remove what killed runs have left behind."""

    def revoke(url: str, key_id: str) -> bool:
        try:
            return revoke_key(client.at(url, with_key=url == client.url), key_id)
        except MeshError:
            return False

    for key_id in remove_abandoned(root, revoke):
        complain(f"the key {key_id} of a run that was killed could not be revoked yet")


def _tell(agent: Agent, client: ApiClient, model: LaunchModel) -> None:
    """Announce the next steps, and warn about a context that is too small."""
    state = "" if model.is_loaded else "; it loads with the first request"
    say(
        f"{agent.title} uses {model.name} at {client.url} ({model.context_tokens} tokens of context){state}", sys.stderr
    )
    if model.context_tokens < agent.needs_tokens:
        complain(
            f"the instructions and tools of {agent.title} need about {agent.needs_tokens} tokens of context, so its "
            "requests may be refused; use a model with a longer context"
        )


def certificates(url: str, certificate: Path | None) -> str:
    """Certificates in PEM form that the agent is to trust: the system's and the node's; "" if the node has no own."""
    if not url.startswith("https:"):
        return ""
    own = os.environ.get("EXO_MESH_API_CA") or certificate
    if not own:
        return ""
    system = ssl.get_default_verify_paths().cafile
    return "\n".join(Path(path).read_text(encoding="utf-8-sig") for path in (system, own) if path)


def _listed() -> str:
    rows = [
        [agent.name, agent.title, "yes" if shutil.which(agent.program) else "no", agent.install]
        for agent in AGENTS.values()
    ]
    return fitted(["AGENT", "NAME", "INSTALLED", "INSTALL WITH"], rows, line_width())


def _shown(agent: Agent, client: ApiClient, model: LaunchModel, arguments: list[str]) -> str:
    """What a run would set, as a shell would write it; without a key, because none is made."""
    target = LaunchTarget(client.url, _SHOWN_KEY, model.name, model.context_tokens, _SHOWN_FOLDER)
    setup = agent.setup(target)
    lines = [f"unset {name}" for name in setup.unset]
    lines += [f"export {name}={shlex.quote(text)}" for name, text in setup.environ.items()]
    lines += [f"# {_SHOWN_FOLDER / name}: {text}" for name, text in setup.files.items()]
    return "\n".join([*lines, shlex.join([agent.program, *setup.arguments, *arguments])])
