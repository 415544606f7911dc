"""Plans the systemd service of a node: its units, from the templates in units/, and the systemctl commands."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from exo_mesh.cli.services.plan import ServiceFile, ServicePlan, ServiceStep

UNIT = "exo-mesh.service"
SLEEP_UNIT = "exo-mesh-sleep.service"
RKLLAMA_UNIT = "rkllama.service"
SYSTEM_DIR = Path("/etc/systemd/system")
SYSTEM_ENV = Path("/etc/default/exo-mesh")
SYSTEM_STATE = (Path("/var/lib/exo-mesh"), Path("/var/cache/exo-mesh"))
UNIT_DIRS = (SYSTEM_DIR, Path("/usr/local/lib/systemd/system"), Path("/usr/lib/systemd/system"))


def template(name: str, **words: str) -> str:
    """Reads a template of units/ and replaces its @WORDS@."""
    text = resources.files("exo_mesh.cli.services").joinpath("units", name).read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(f"@{word.upper()}@", value)
    return text


def command_word(path: Path | str) -> str:
    """A path as the first word of ExecStart: quoted if it has spaces, with % escaped for systemd."""
    text = str(path).replace("%", "%%")
    return f'"{text}"' if any(character.isspace() for character in text) else text


def system_plan(program: Path, root: Path = Path("/"), rkllama: Path | None = None) -> ServicePlan:
    """Plans the service of a machine.

    root: directory below which an installed unit of RKLLAMA is looked for. rkllama: program of RKLLAMA if the plan is
    to have a unit for it.
    """
    word = command_word(program)
    folder = SYSTEM_DIR / f"{UNIT}.d"
    drop_in = folder / "10-rkllama.conf"
    env = template("settings.env", restart="systemctl restart exo-mesh")
    files = [
        ServiceFile(SYSTEM_DIR / UNIT, template(UNIT, program=word)),
        ServiceFile(SYSTEM_DIR / SLEEP_UNIT, template(SLEEP_UNIT, program=word)),
        ServiceFile(SYSTEM_ENV, env, is_own=True, mode=0o600),
    ]
    if rkllama is not None:
        files.append(ServiceFile(SYSTEM_DIR / RKLLAMA_UNIT, template(RKLLAMA_UNIT, rkllama=command_word(rkllama))))
    has_rkllama = rkllama is not None or any((root / str(one)[1:] / RKLLAMA_UNIT).exists() for one in UNIT_DIRS)
    if has_rkllama:
        files.append(ServiceFile(drop_in, template("rkllama.conf", program=word)))
    units = [UNIT, SLEEP_UNIT, *([RKLLAMA_UNIT] if rkllama is not None else [])]
    notes = ("RKLLAMA is installed: the node starts after it",) if has_rkllama else ()
    return ServicePlan(
        name=UNIT,
        files=tuple(files),
        stale=() if has_rkllama else (drop_in,),
        before=(ServiceStep(("systemctl", "daemon-reload")), ServiceStep(("systemctl", "enable", *units))),
        start=(ServiceStep(("systemctl", "restart", UNIT)),),
        offline=(ServiceStep(("systemctl", f"--root={root}", "enable", *units)),),
        stop=(ServiceStep(("systemctl", "disable", "--now", UNIT, SLEEP_UNIT), may_fail=True),),
        after=(ServiceStep(("systemctl", "daemon-reload")),),
        state=("systemctl", "show", UNIT, f"--property={','.join(STATE_PROPERTIES)}"),
        logs="journalctl -u exo-mesh",
        kept=SYSTEM_STATE,
        notes=notes,
    )


STATE_PROPERTIES = (
    "ActiveState",
    "SubState",
    "UnitFileState",
    "NRestarts",
    "Result",
    "MainPID",
    "ExecMainStatus",
    "StatusText",
)

SANDBOX_EXITS = (217, 218, 226)
"""Exit codes of a service for which systemd cannot create the namespaces of the unit: USER, CAPABILITIES and NAMESPACE
in systemd.exec(5)."""


def no_namespaces_file(config_home: Path) -> Path:
    """The drop-in of a user's unit that turns off the options which need namespaces."""
    return config_home / "systemd" / "user" / f"{UNIT}.d" / "20-no-namespaces.conf"


def user_plan(program: Path, config_home: Path, data_home: Path, *, can_sandbox: bool = True) -> ServicePlan:
    """Plans the service of a user. config_home: usually ~/.config; data_home: the home of the node."""
    folder = config_home / "systemd" / "user"
    drop_in = no_namespaces_file(config_home)
    env = template("settings.env", restart="systemctl --user restart exo-mesh")
    files = [
        ServiceFile(folder / UNIT, template("exo-mesh.user.service", program=command_word(program))),
        ServiceFile(config_home / "exo-mesh" / "service.env", env, is_own=True, mode=0o600),
    ]
    if not can_sandbox:
        files.append(ServiceFile(drop_in, template("no-namespaces.conf")))
    user = ("systemctl", "--user")
    notes = ["the service ends when you log out, unless you run once: loginctl enable-linger"]
    if not can_sandbox:
        notes.append("users may not create namespaces here: the service runs without that part of its sandbox")
    return ServicePlan(
        name=UNIT,
        files=tuple(files),
        stale=() if not can_sandbox else (drop_in,),
        before=(ServiceStep((*user, "daemon-reload")), ServiceStep((*user, "enable", UNIT))),
        start=(ServiceStep((*user, "restart", UNIT)),),
        offline=(),
        stop=(ServiceStep((*user, "disable", "--now", UNIT), may_fail=True),),
        after=(ServiceStep((*user, "daemon-reload")),),
        state=(*user, "show", UNIT, f"--property={','.join(STATE_PROPERTIES)}"),
        logs="journalctl --user -u exo-mesh",
        kept=(config_home / "exo-mesh", data_home),
        notes=tuple(notes),
    )


def exit_status(output: str) -> int:
    """The last exit code of the service, from the output of `systemctl show`; 0 if it runs or never ran."""
    found = dict(line.partition("=")[::2] for line in output.splitlines() if "=" in line)
    text = found.get("ExecMainStatus", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def state_line(output: str) -> tuple[bool, str]:
    """(whether it runs, its state in one line), from the output of `systemctl show`."""
    found = dict(line.partition("=")[::2] for line in output.splitlines() if "=" in line)
    active, sub = found.get("ActiveState", "unknown"), found.get("SubState", "")
    parts = [f"{active} ({sub})", found.get("UnitFileState") or "not enabled", f"{found.get('NRestarts', 0)} restarts"]
    if found.get("Result", "success") != "success":
        parts.append(f"last result: {found['Result']}")
    if found.get("StatusText"):
        parts.append(found["StatusText"])
    return active == "active", ", ".join(parts)
