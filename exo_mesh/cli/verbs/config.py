"""Show the settings in force (`show`), the source of each (`show --origin`), or all that exist (`reference`).

`mesh` shows the settings that a running node shares with the whole mesh. `mesh NAME=VALUE` sets one at every node, and
`mesh NAME=` removes it.
"""

from __future__ import annotations

import argparse
import os
import sys

from exo_mesh.base.printable import quoted
from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.parser import add_api_flags, add_node_flags, node_flags
from exo_mesh.cli.tables import print_json, say, say_table
from exo_mesh.settings.aliases import ALIASES
from exo_mesh.settings.config import ConfigError, LoadedSettings, Settings, default_settings
from exo_mesh.settings.loading import load_settings
from exo_mesh.settings.setting import Setting
from exo_mesh.settings.table import GROUPS, SETTINGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what to show, `--origin`, `--json`, and the flags of a node, whose effect is shown."""
    what = "show: settings in force; reference: Markdown tables of all; mesh: settings of the whole mesh"
    parser.add_argument("what", choices=("show", "reference", "mesh"), help=what)
    parser.add_argument("changes", nargs="*", metavar="NAME=VALUE", help="for `mesh`: settings to change")
    parser.add_argument("--origin", action="store_true", help="show where each value comes from")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_api_flags(parser, json=False, home=False)
    add_node_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Loads the settings like `serve`, and prints them."""
    if args.what == "reference":
        print(reference())
        return exit_codes.OK
    if args.what == "mesh":
        return _mesh(args)
    loaded = load_settings(node_flags(args), os.environ)
    for warning in loaded.warnings:
        print(f"exo-mesh: {warning}", file=sys.stderr)
    if args.json:
        print_json(_as_json(loaded, origin=args.origin))
        return exit_codes.OK
    texts = {name: _shown(setting, loaded.settings) or '""' for name, setting in SETTINGS.items()}
    header, rows = ["SETTING", "VALUE"], [[name, text] for name, text in texts.items()]
    if args.origin:
        header, rows = [*header, "ORIGIN"], [[*row, loaded.origins[row[0]]] for row in rows]
    say_table(header, rows)
    if args.origin:
        print(f"\nconfig.toml: {loaded.config_file}{'' if loaded.config_file.is_file() else ' (there is none)'}")
    return exit_codes.OK


def _mesh(args: argparse.Namespace) -> int:
    """Shows the settings of the mesh, after making the changes if any. Raises MeshErrors."""
    changes = {name: value or None for name, _, value in (change.partition("=") for change in args.changes)}
    if wrong := [change for change in args.changes if "=" not in change]:
        raise ConfigError(f"{quoted(wrong[0])} is not of the form NAME=VALUE; NAME= removes a setting")
    homes = node_flags(args).get("home")
    client = ApiClient(args.api_url, homes[-1] if homes else None)
    texts: dict[str, str] = (client.put("/config", changes) if changes else client.get("/config"))["mesh"]
    if args.json:
        print_json(texts)
    elif texts:
        say_table(["SETTING", "VALUE"], [list(row) for row in texts.items()])
    else:
        say("the mesh shares no settings: each node uses its own")
    return exit_codes.OK


def _as_json(loaded: LoadedSettings, *, origin: bool) -> dict[str, object]:
    texts = {name: _shown(setting, loaded.settings) for name, setting in SETTINGS.items()}
    if not origin:
        return dict(texts)
    return {name: {"value": text, "origin": loaded.origins[name]} for name, text in texts.items()}


def _shown(setting: Setting, settings: Settings) -> str:
    """The value in force as text; secret parts are `***`."""
    if setting.secret:
        return setting.separator.join(f"{key}=***" for key in setting.value(settings))
    return setting.text(settings)


def reference() -> str:
    """The settings as Markdown, a table for each group, and the aliases; docs/reference/settings.md has them."""
    lines = []
    for title, settings in GROUPS.items():
        lines += [f"### {title.capitalize()}", "", "| flag | variable | key in `config.toml` | default | meaning |"]
        lines += ["|---|---|---|---|---|", *map(_reference_row, settings), ""]
    lines += ["### Aliases", "", "| alias | stands for | note |", "|---|---|---|"]
    lines += [f"| `{alias.variable}` | `{SETTINGS[alias.setting].variable}` | {alias.note} |" for alias in ALIASES]
    return "\n".join(lines)


def _reference_row(setting: Setting) -> str:
    flag = f"`{setting.flag} {setting.metavar}".rstrip() + "`"
    key = "-" if setting.name == "home" else f"`{setting.name}`"
    return f"| {flag} | `{setting.variable}` | {key} | {_default(setting)} | {setting.help} |"


def _default(setting: Setting) -> str:
    """The default for the reference; words instead of values that depend on the machine."""
    text = setting.text(default_settings())
    return setting.default_words or (f"`{text}`" if text else "")
