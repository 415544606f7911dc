"""What the command line says and which code it exits with, without a node."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.base.printable import cells
from exo_mesh.base.telemetry.tables import columns
from exo_mesh.cli import exit_codes
from exo_mesh.cli.main import VERBS, main, usage
from exo_mesh.cli.model_verbs import module_of
from exo_mesh.cli.parser import Parser, add_node_flags, seconds
from exo_mesh.cli.tables import fitted, print_table, say, state_text, wrapped
from exo_mesh.settings.foreign_verbs import VERB_HINTS
from exo_mesh.settings.table import GROUPS, SETTINGS
from tests.cli.closed_port import closed_port

DOCS = Path(__file__).resolve().parents[2] / "docs"
ALL_VERBS = list(VERBS)
HEAVY = {
    "grpc",
    "aiohttp",
    "numpy",
    "rich",
    "mlx",
    "tokenizers",
    "jinja2",
    "zeroconf",
    "uvloop",
    "psutil",
    "shtab",
}

ASKING = {
    "run": ["m", "hello"],
    "chat": ["m", "hello"],
    "launch": ["claude", "--print"],
    "batch": [str(DOCS.parent / "examples" / "batch.jsonl")],
    "status": [],
    "topology": [],
    "preview": ["m"],
    "load": ["m"],
    "explain": ["r-1"],
    "ps": [],
    "top": [],
    "models": [],
    "pull": ["m"],
    "list": [],
    "ls": [],
    "show": ["m"],
    "rm": ["m"],
    "search": ["q"],
    "stop": ["x"],
    "node": ["stop"],
    "wake": ["x"],
    "drain": [],
    "nginx-config": [],
    "invite": [],
    "config": ["mesh"],
}
"""The verbs that ask a node, with the arguments that they need. `doctor` is not here: that no node answers is a finding
of it, and no failure."""


def verbs_with(flag: str) -> set[str]:
    """The verbs that have a flag, or a part (`bench ring`) that has it."""
    found = set()
    for verb in ALL_VERBS:
        parser = Parser(prog=verb)
        importlib.import_module(module_of(verb)).add_arguments(parser)
        parts = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parsers = [parser, *(part for choices in parts for part in choices.values())]
        if any(flag in one._option_string_actions for one in parsers):
            found.add(verb)
    return found


@pytest.mark.parametrize("argv", [["--help"], ["version"], ["serve", "--help"], ["config", "show"], ["ps", "--help"],
     ["doctor", "--help"], ["completion", "--help"], ["list", "--help"], ["pull", "--help"]])  # fmt: skip
def test_light_verbs_import_nothing_heavy(argv: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from exo_mesh.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    home = ["--home", str(tmp_path)] if argv[0] == "config" else []
    done = subprocess.run([sys.executable, "-c", code, *argv, *home], capture_output=True, text=True, check=True)
    assert done.stdout
    assert set(done.stderr.split()) & HEAVY == set()


def test_the_child_of_the_ring_benchmark_imports_nothing_heavy() -> None:
    code = "import sys, exo_mesh.cli.bench.tcp; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "exo_mesh" in done.stdout.split()
    assert set(done.stdout.split()) & HEAVY == set()


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == exit_codes.OK
    shown = capsys.readouterr().out
    assert all(f"\n  {verb} " in shown for verb in ALL_VERBS if verb not in ("ls", "chat"))


def test_the_help_names_no_module() -> None:
    modules = {path.stem for path in (DOCS.parent / "exo_mesh").rglob("*.py") if "_" in path.stem.strip("_")}
    for verb in ALL_VERBS:
        text = importlib.import_module(module_of(verb)).__doc__ or ""
        assert not modules & set(re.findall(r"\w+", text)), verb


def test_an_error_on_a_terminal_is_not_cut_in_a_word() -> None:
    text = "exo-mesh: no node answers at http://127.0.0.1:52415; start one with `exo-mesh`, or give its address\n  log"
    lines = wrapped(text, 40).splitlines()
    assert " ".join(lines).split() == text.split()
    assert all(len(line) <= 40 for line in lines) and lines[-1] == "  log"
    assert wrapped("a" * 50 + " b", 40) == "a" * 50 + "\nb"
    assert wrapped("  -> free some memory", 20) == "  -> free some\n  memory"


def test_a_sentence_is_wrapped_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "41")
    text = "exo-mesh-demo 0-7 stays here until the node stops; then another peer loads it"
    for stream, lines in ((Terminal(), 2), (io.StringIO(), 1)):
        say(text, stream)
        shown = stream.getvalue().splitlines()
        assert len(shown) == lines and " ".join(shown) == text


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == exit_codes.OK
    assert f"usage: exo-mesh {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["stauts"], "no such verb: stauts; did you mean status?"),
        (["xyzzy"], "no such verb: xyzzy; see exo-mesh --help"),
        (["--api-prot", "1"], "unknown flag --api-prot; did you mean --api-port?"),
        (["--api-prot=1"], "unknown flag --api-prot; did you mean --api-port?"),
        (["serve", "--qqqqq"], "unknown flag --qqqqq; see exo-mesh serve --help"),
        (["--force-master"], "exo-mesh has no master"),
        (["--no-loopback-exemption"], "being on this machine gives no rights any more"),
        (["serve", "--force-master"], "exo-mesh has no master"),
        (["--node-id", "a"], "each node makes its own id"),
        (["--node-id=a"], "each node makes its own id"),
        (["--tailscale-api-key", "tskey-1"], "name it with --tailscale-api-key-file"),
        (["serve", "--disable-tui"], "`exo-mesh top` shows the mesh live"),
        (["mlx.launch"], "start `exo-mesh` on each machine"),
        (["mlx.distributed_config"], "`exo-mesh doctor rdma` what is missing"),
        (["--home", "h1", "invite"], "the verb comes first: exo-mesh invite --home h1"),
        (
            ["--api-url", "http://a b", "status", "--json"],
            "the verb comes first: exo-mesh status --api-url 'http://a b' --json",
        ),
        (["--qqqqq", "chat", "m"], "the verb comes first: exo-mesh chat --qqqqq m"),
        (["serve", "invite"], 'unexpected argument "invite"; see exo-mesh serve --help'),
        (["demo", "--api-port", "70000"], "--api-port 70000: a whole number from 0 to 65535 is needed"),
        (["key", "new", "x" * 41], f'name is "{"x" * 41}"; it must be 1 to 40 printable characters'),
        (["key", "list", "laptop"], 'key list takes no name or id: "laptop" is too much'),
        (["key", "remove"], "key remove needs the ID of a key or a session"),
        (["run"], "the following arguments are required: MODEL; see exo-mesh run --help"),
        (["help", "runn"], "no such verb: runn; did you mean run?"),
        (["log"], "`exo-mesh node log-level` changes how much"),
        (["ps", "extra"], 'unexpected argument "extra"; see exo-mesh ps --help'),
        (["--api-p", "1"], "unknown flag --api-p; did you mean --api-port?"),
        (["--api-port"], "--api-port/--port: expected one argument"),
        (["--api-port", "x"], "--api-port x: a whole number from 0 to 65535 is needed"),
        (["demo", "--peers", "0"], "--peers 0: a whole number from 1 to 8 is needed"),
        (["demo", "--peers", "x"], "--peers: invalid int value: 'x'"),
        (["demo", "--engine", "nope"], '--engine nope: no engine "nope"; installed'),
        (["config", "hide"], "invalid choice: 'hide'"),
        (["status", "--api-url", "ftp://x"], "--api-url ftp://x: not an HTTP address; use one such as"),
        (["status", "--api-url", "http://[::1"], "--api-url http://[::1: not an HTTP address; use one such as"),
        (["status", "--api-url", "http://\udcff"], "not an HTTP address; use one such as"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == exit_codes.USAGE
    complaint = capsys.readouterr().err
    assert complaint.startswith("exo-mesh: ")
    assert complaint.count("\n") == 1
    assert message in complaint


WIDE = "unusable: its file is cut short: the tensor ends at byte 31866688, the file has only 2000000"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 400])
def test_a_table_on_a_terminal_has_no_line_that_the_terminal_would_break(width: int) -> None:
    header = ("MODEL", "SIZE", "FITS")
    rows = [("alpha-7b", "4.1 GB", "yes, 1 peer"), ("beta", "-", WIDE), ("größe-模型", "1.0 GB", "")]
    shown = fitted(header, rows, width)
    assert all(cells(line) <= width for line in shown.splitlines()), shown
    words = {word for row in rows for cell in row for word in cell.split()} - {"-"}
    assert words <= set(shown.split()), "no word is broken or lost"
    assert fitted(header, rows, None) == columns(header, rows) == fitted(header, rows, 400)


def test_a_table_without_room_for_its_columns_is_a_block_for_each_row() -> None:
    header, rows = ("  PEER", "ROLE", "ADDRESS"), [("* a", "full", "10.0.0.1"), ("  b", "-", "nothing known as yet")]
    assert fitted(header, rows, 25).splitlines() == [
        "* a", "  ROLE     full", "  ADDRESS  10.0.0.1",
        "b", "  ADDRESS  nothing known", "           as yet",
    ]  # fmt: skip
    assert fitted(("A", ""), [("word " * 4, "")], 12) == "word word word word"
    assert fitted(header, [], 10).split() == ["PEER", "ROLE", "ADDRESS"]


@pytest.mark.parametrize("no_colour", [False, True])
def test_a_table_in_colour_breaks_its_lines_where_a_plain_one_does(no_colour: bool) -> None:
    from rich.console import Console

    header, rows = ("MODEL", "SIZE", "FITS"), [("alpha-7b", "4.1 GB", state_text("yes")), ("beta", "-", WIDE)]
    rows.append(("gamma", "1 B", "an-instance-with-a-very-long-name-1"))
    for width in (30, 50, 60, 200):
        console = Console(
            file=io.StringIO(), width=width, force_terminal=True, color_system=None if no_colour else "standard"
        )
        print_table(console, header, rows)
        file = console.file
        assert isinstance(file, io.StringIO)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
        assert [line.rstrip() for line in plain.splitlines()] == fitted(header, rows, width).splitlines()


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "5m", ""])
@pytest.mark.parametrize(
    "argv",
    [
        ["drain", "--wait"], ["wake", "beta", "--wait"], ["batch", "x.jsonl", "--patience"],
        ["node", "kill-all", "--dry-run", "--grace"], ["nginx-config", "--every"],
        ["service", "wait", "127.0.0.1:9", "--for"],
    ],
)  # fmt: skip
def test_a_duration_is_a_number_of_seconds(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv[:-1], f"{argv[-1]}={text}"]) == exit_codes.USAGE
    assert f'{argv[-1]}: "{text}" is not a number of seconds, such as 30' in capsys.readouterr().err


def test_every_duration_of_the_command_line_has_that_type() -> None:
    for verb in (*VERBS, "complete"):
        parser = Parser(prog=verb)
        importlib.import_module(module_of(verb)).add_arguments(parser)
        for action in parser._actions:
            settings = action.dest.startswith("setting_")
            assert settings or action.metavar != "SECONDS" or action.type is seconds, (verb, action.option_strings)


def test_help_of_a_verb_may_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help", "ps"], ["ps", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == exit_codes.OK
        assert capsys.readouterr().out.startswith("usage: exo-mesh ps ")
    assert main(["help"]) == exit_codes.OK
    assert "models:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "words", "parsed"),
    [
        ("run", ["m", "--seed", "1", "Why", "me?"], {"model": "m", "prompt": ["Why", "me?"], "seed": 1}),
        ("run", ["--seed", "1", "m", "--", "-5", "degrees"], {"model": "m", "prompt": ["-5", "degrees"], "seed": 1}),
        ("node", ["log-level", "--json", "debug"], {"action": "log-level", "level": "debug", "json": True}),
        ("key", ["new", "--role", "use", "laptop"], {"what": "new", "role": "use", "id": "laptop"}),
        ("explain", ["--json", "req_1"], {"request": "req_1", "json": True}),
        ("config", ["mesh", "--json", "log_level=debug"], {"what": "mesh", "changes": ["log_level=debug"]}),
        (
            "launch",
            ["--model", "m", "claude", "--", "-p", "x"],
            {"agent": "claude", "model": "m", "arguments": ["-p", "x"]},
        ),
        ("cache", ["rm", "--json", "k"], {"what": "rm", "which": "k", "json": True}),
    ],
)
def test_flags_may_stand_between_the_arguments_of_a_verb(verb: str, words: list[str], parsed: dict[str, Any]) -> None:
    module = importlib.import_module(module_of(verb))
    parser = Parser(prog=f"exo-mesh {verb}")
    module.add_arguments(parser)
    args = vars(parser.parse_all(words))
    assert {name: args[name] for name in parsed} == parsed


@pytest.mark.parametrize("verb", ASKING)
def test_without_a_node_the_exit_code_is_3(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    assert main([verb, *ASKING[verb], "--api-url", url]) == exit_codes.NO_NODE
    complaint = capsys.readouterr().err
    assert complaint == (
        f"exo-mesh: no node answers at {url}; start one with `exo-mesh`, or give its address with --api-url\n"
    )


def test_version_names_package_protocol_and_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == exit_codes.OK
    assert "exo-mesh 0." in capsys.readouterr().out
    assert main(["version", "--json"]) == exit_codes.OK
    assert {"exo-mesh", "protocol", "grpcio", "mlx"} <= json.loads(capsys.readouterr().out).keys()


def test_config_show_says_where_values_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXO_MESH_NAME", "alpha")
    (tmp_path / "config.toml").write_text("grpc_port = 6000\n")
    assert main(["config", "show", "--origin", "--json", "--home", str(tmp_path), "--api-port", "7"]) == exit_codes.OK
    shown = json.loads(capsys.readouterr().out)
    assert shown["api_port"] == {"value": "7", "origin": "flag --api-port"}
    assert shown["name"] == {"value": "alpha", "origin": "environment EXO_MESH_NAME"}
    assert shown["grpc_port"] == {"value": "6000", "origin": f"{tmp_path}/config.toml:grpc_port"}
    assert shown["placement"] == {"value": "memory", "origin": "default"}
    assert main(["config", "show", "--origin", "--home", str(tmp_path)]) == exit_codes.OK
    assert "environment EXO_MESH_NAME" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "level"), [([], "info"), (["-v"], "debug"), (["-q"], "warning")])
def test_v_and_q_set_the_log_level(
    flags: list[str], level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", "--json", "--home", str(tmp_path), *flags]) == exit_codes.OK
    assert json.loads(capsys.readouterr().out)["log_level"] == level


def test_config_show_names_the_file_and_the_alias(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUEUE_MAX", "5")
    assert main(["config", "show", "--origin", "--home", str(tmp_path)]) == exit_codes.OK
    shown = capsys.readouterr().out
    assert shown.endswith(f"config.toml: {tmp_path}/config.toml (there is none)\n")
    row = next(line for line in shown.splitlines() if line.startswith("max_queued "))
    assert row.split(maxsplit=2) == ["max_queued", "5", "environment QUEUE_MAX"]


def test_engines_lists_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", "--json"]) == exit_codes.OK
    engines = {engine["name"]: engine for engine in json.loads(capsys.readouterr().out)}
    assert {"mlx", "dummy"} <= engines.keys()
    assert engines["dummy"]["available"]
    assert not engines["dummy"]["chosen"]
    assert main(["engines"]) == exit_codes.OK
    assert "dummy" in capsys.readouterr().out


def test_every_setting_has_a_flag() -> None:
    parser = Parser(prog="x")
    add_node_flags(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {setting.flag for setting in SETTINGS.values()} <= flags


def test_the_help_and_the_documentation_show_the_groups_of_the_settings() -> None:
    parser = Parser(prog="x")
    add_node_flags(parser)
    page = (DOCS / "reference" / "settings.md").read_text()
    helped = re.findall(r"^(\w+):$", parser.format_help(), re.MULTILINE)
    assert [title for title in helped if title != "options"] == [*GROUPS]
    for group in parser._action_groups:
        if group.title in GROUPS:
            shown = {flag for action in group._group_actions for flag in action.option_strings}
            (section,) = re.findall(rf"^### {group.title.capitalize()}\n(.*?)\n\n###", page, re.MULTILINE | re.DOTALL)
            assert set(re.findall(r"^\| `(--[\w-]+)", section, re.MULTILINE)) <= shown
            assert {setting.flag for setting in GROUPS[group.title]} <= shown


@pytest.mark.parametrize(
    ("verb", "usage_line"),
    [("serve", "usage: exo-mesh serve [flags]"), ("run", "usage: exo-mesh run [flags] MODEL [PROMPT ...]")],
)
def test_the_help_of_a_verb_with_all_settings_begins_with_a_short_line(verb: str, usage_line: str) -> None:
    parser = Parser(prog=f"exo-mesh {verb}")
    importlib.import_module(module_of(verb)).add_arguments(parser)
    assert parser.format_help().splitlines()[:2] == [usage_line, ""]


def test_the_documentation_has_every_verb_and_exit_code() -> None:
    text = (DOCS / "reference" / "cli.md").read_text()
    rows = {verb for verb in ALL_VERBS if re.search(rf"^\| (`\w+`, )*`{verb}\b", text, re.MULTILINE)}
    assert rows == set(ALL_VERBS), "docs/reference/cli.md: the table of verbs"
    for code, meaning in exit_codes.MEANINGS.items():
        assert f"| {code} | {meaning} |" in text


def test_the_documentation_says_which_verbs_ask_a_node_and_which_print_json() -> None:
    text = (DOCS / "reference" / "cli.md").read_text()
    asking = re.search(r"^The verbs that ask a node \(([^)]*)\)", text, re.MULTILINE)
    printing = re.search(r"^((?:`[\w ]+`(?:,| and)\s)+`\w+`)\stake `--json`", text, re.MULTILINE)
    assert asking is not None and printing is not None
    assert ASKING.keys() | {"doctor", "key"} == verbs_with("--api-url"), "add the verb to ASKING"
    assert set(re.findall(r"`([\w-]+)", asking[1])) == verbs_with("--api-url"), "cli.md: the verbs that ask a node"
    assert set(re.findall(r"`(\w+)", printing[1])) == verbs_with("--json"), "cli.md: the verbs that take --json"


def test_the_help_fits_a_small_terminal() -> None:
    assert usage().count("\n") < 50


def test_the_help_has_every_verb_once() -> None:
    shown = re.findall(r"^  ([\w-]+) ", usage(), re.MULTILINE)
    assert sorted(shown) == sorted(VERBS.keys() - {"ls", "chat"})


@pytest.mark.parametrize("verb", sorted(VERB_HINTS))
def test_verbs_of_similar_programs_name_ours(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each hint is one line, and the verbs that it names exist."""
    assert verb not in ALL_VERBS
    assert main([verb, "something"]) == exit_codes.USAGE
    said = capsys.readouterr().err
    assert said == f"exo-mesh: there is no verb {verb}: {VERB_HINTS[verb]}\n"
    assert set(re.findall(r"`exo-mesh (\w+)", VERB_HINTS[verb])) <= set(ALL_VERBS)


@pytest.mark.parametrize(
    "verb", ["serve", "run", "pull", "list", "ls", "ps", "show", "stop", "rm", "search", "top", "version"]
)
def test_what_exists_under_the_same_name_elsewhere_has_no_hint(verb: str) -> None:
    assert verb in ALL_VERBS


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("secret", "new"),
        ("key", "new, list, remove, local"),
        ("service", "install, uninstall, status"),
        ("config", "show, reference, mesh"),
        ("cache", "ls, rm, pin, unpin"),
        ("completion", "bash, zsh, fish"),
    ],
)
def test_a_verb_without_its_second_word_names_the_words(
    verb: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb]) == exit_codes.USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith(f"exo-mesh: one of these words is needed: {words}") and said.endswith(
        f"see exo-mesh {verb} --help"
    )
