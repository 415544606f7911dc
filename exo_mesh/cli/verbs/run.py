"""Ask a model one question, from the command line or standard input; without a question, start a conversation.

Uses the node of this machine. If none runs, the command starts one and stops it at the end.
In a conversation, /help lists the commands, Ctrl-C stops an answer, and /bye or Ctrl-D leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient, NoNodeError
from exo_mesh.cli.client.mesh_nodes import MeshNodes
from exo_mesh.cli.model_paths import models_dir_for, path_hint
from exo_mesh.cli.parser import add_api_flags, add_node_flags, model_argument, node_flags
from exo_mesh.cli.tables import print_json
from exo_mesh.cli.terminal import piped_text
from exo_mesh.cli.verbs.chat.answer import ChatAnswer
from exo_mesh.cli.verbs.chat.commands import ChatState, Commands
from exo_mesh.cli.verbs.chat.conversation import Dialogue, SavedChats, system_message
from exo_mesh.cli.verbs.chat.following import follow
from exo_mesh.cli.verbs.chat.history import QuestionHistory
from exo_mesh.cli.verbs.chat.lines import LineReader
from exo_mesh.cli.verbs.chat.loop import Chat, answer_sink, report
from exo_mesh.cli.verbs.chat.sinks import SilentSink
from exo_mesh.errors import InputError, UnknownModelError
from exo_mesh.settings.config import Settings
from exo_mesh.settings.loading import load_settings
from exo_mesh.settings.table import SETTINGS

_START_DEADLINE_S = 60.0
_FIND_MODEL_S, _FIND_HUB_ID_S = 3.0, 1.0
"""Time in which a node that was just started looks for a peer with the model; shorter for a hub id: the hub has it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, PROMPT, sampling, output, and the settings for a node that the command starts."""
    parser.add_argument(
        "model", metavar="MODEL", type=model_argument, help="hub id, directory or alias, such as exo-mesh-demo"
    )
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="*",
        default=[],
        help="the question, in quotes or not; by default piped standard input",
    )
    parser.add_argument("--prompt", dest="prompt_flag", metavar="TEXT", help="the same as PROMPT")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 = always the most likely token")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer in tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")
    parser.add_argument("--think", choices=("on", "off"), help="let the model think before it answers, or not")
    parser.add_argument("--verbose", action="store_true", help="print tokens/s after a single answer, too")
    parser.add_argument("--plain", action="store_true", help="print the text as the model writes it, without markdown")
    parser.add_argument("--no-history", action="store_true", help="do not save questions for the next run")
    add_api_flags(parser, home=False)
    add_node_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints one answer, or runs a conversation."""
    prompt = " ".join(args.prompt) if args.prompt else args.prompt_flag
    if args.prompt and args.prompt_flag is not None:
        raise InputError("the prompt is given twice: after the model and with --prompt", param="prompt")
    if prompt is None and not sys.stdin.isatty():
        prompt = piped_text().strip()
        if not prompt:
            raise InputError("the prompt on standard input is empty", param="prompt")
    if prompt is None and args.json:
        raise InputError("--json needs a prompt", param="prompt")
    try:
        with _node(args, "this conversation" if prompt is None else "this question") as client:
            members = MeshNodes(client)
            if prompt is not None:
                return _answer_once(members, args, prompt)
            return _converse(members, args, _home_of(args))
    except UnknownModelError as exc:
        exc.args = (f"{exc}{path_hint(args.model)}",)
        raise


def _home_of(args: argparse.Namespace) -> Path:
    """The home in which questions and conversations are saved."""
    return load_settings(node_flags(args), os.environ).settings.home


def _answer_once(members: MeshNodes, args: argparse.Namespace, prompt: str) -> int:
    messages = [*system_message(args.system), {"role": "user", "content": prompt}]
    parameters = _parameters(args)
    is_loaded = members.learn_whether_loaded(args.model)
    if args.json:
        answer = follow(members, args.model, messages, parameters, SilentSink(), is_loaded=is_loaded)
        print_json(_as_json(args.model, answer))
        return exit_codes.OK
    with answer_sink(members, args.model, [], markdown=not args.plain, stream=sys.stdout) as sink:
        answer = follow(members, args.model, messages, parameters, sink, is_loaded=is_loaded)
    report(answer, verbose=args.verbose)
    return exit_codes.OK


def _converse(members: MeshNodes, args: argparse.Namespace, home: Path) -> int:
    conversation = Dialogue(args.model, args.system or "", _parameters(args))
    state = ChatState(conversation, markdown=not args.plain, history=not args.no_history)
    commands = Commands(state, members, SavedChats(home))
    lines = LineReader(QuestionHistory(home), commands.complete)
    lines.keeps_history = state.history
    Chat(state, members, commands, lines).run()
    return exit_codes.OK


@contextlib.contextmanager
def _node(args: argparse.Namespace, what: str) -> Iterator[ApiClient]:
    """A client of the node at --api-url; if none was named and none answers, of a node that is started for this run.
    what: see own_node."""
    flags = node_flags(args)
    named = args.api_url or os.environ.get("EXO_MESH_API_URL")
    own = load_settings(flags, os.environ).settings  # raises for a wrong flag even if a node runs already
    certificate = own.tls_cert if "tls_cert" in flags else None
    client = ApiClient(args.api_url, flags["home"][-1] if "home" in flags else None, certificate)
    try:
        client.get("/healthz")
    except NoNodeError:
        if named:
            raise
    else:
        yield client
        return
    with own_node(_with_directory(flags, args.model), args.model, own, what) as client:
        yield client


@contextlib.contextmanager
def own_node(flags: dict[str, list[str]], model: str, own: Settings, what: str) -> Iterator[ApiClient]:
    """A client of a node that is started with these flags and stopped at the end. model: gets a short time to be found
    at a peer. own: what the flags mean, with the other settings. what: names the use of the node, such as "this
    question", in the line that people read while they wait."""
    from exo_mesh.cli.client.child_node import ChildNode, client_of

    words = [word for name, texts in flags.items() for text in texts for word in _flag_words(name, text)]
    scratch = Path(tempfile.mkdtemp(prefix="exo-mesh-run-"))
    print(f"exo-mesh: no node runs here: starting one for {what}", file=sys.stderr, flush=True)
    child = ChildNode(words, scratch / "node.log", os.environ)
    try:
        ready = child.wait_ready(_START_DEADLINE_S)
        if not ready["api_url"]:
            raise InputError("exo-mesh run needs the API: leave out --no-api", param="no_api")
        client = client_of(ready)
        looks_for_peers = own.discovery != ("none",) or bool(own.bootstrap_peers)
        if not _await_model(client, model, looks_for_peers=looks_for_peers) and own.offline:
            print(f"exo-mesh: this node is offline, so only peers can provide {model}", file=sys.stderr)
        yield client
    finally:
        child.stop()
    shutil.rmtree(scratch, ignore_errors=True)  # not reached after a failure: its message names the log in there


def _with_directory(flags: dict[str, list[str]], model: str) -> dict[str, list[str]]:
    """The flags of the node to start, with --models-dir added if `model` is an absolute path."""
    if not model.startswith("/"):
        return flags
    return {**flags, "models_dir": [*flags.get("models_dir", []), str(models_dir_for(Path(model)))]}


def _flag_words(name: str, text: str) -> list[str]:
    setting = SETTINGS[name]
    return [setting.flag] if setting.is_switch else [f"{setting.flag}={text}"]


def _await_model(client: ApiClient, model: str, *, looks_for_peers: bool) -> bool:
    """Waits a short time for discovery to find a peer with the model; False if none has it.

    The request then downloads the model from the hub, or is refused with similar names.
    """
    is_hub_id = "/" in model or ":" in model
    patience_s = _FIND_HUB_ID_S if is_hub_id else _FIND_MODEL_S
    end = time.monotonic() + (patience_s if looks_for_peers and not model.startswith("/") else 0)
    while all(model not in (entry["id"], *entry["aliases"]) for entry in client.get("/v1/models")["data"]):
        if time.monotonic() >= end:
            return model.startswith("/")
        time.sleep(0.1)
    return True


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    think = None if args.think is None else args.think == "on"
    given = {
        "temperature": args.temperature, "max_tokens": args.max_tokens, "seed": args.seed, "enable_thinking": think
    }  # fmt: skip
    return {name: value for name, value in given.items() if value is not None}


def _as_json(model: str, answer: ChatAnswer) -> dict[str, Any]:
    return {
        "model": model,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens},
        "tokens_per_s": round(answer.tokens_per_s, 2),
        "first_token_s": round(answer.first_token_s, 4),
    }
