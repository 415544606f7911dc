"""Plans the launchd service of a node (macOS): a LaunchDaemon or LaunchAgent, and the launchctl commands."""

from __future__ import annotations

import plistlib
from pathlib import Path
from typing import Any

from exo_mesh.cli.services.plan import ServiceFile, ServicePlan, ServiceStep
from exo_mesh.cli.services.systemd_plan import template

LABEL = "exo-mesh.node"
STOP_S = 45
"""Like TimeoutStopSec of the systemd units: --stop-grace and the time that a node needs after it."""
THROTTLE_S = 10
MAX_FILES = 65536
PATH = "/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
"""launchd sets /usr/bin:/bin:/usr/sbin:/sbin only; tools such as macmon are in Homebrew's directories."""

START = '[ ! -r "$0" ] || { set -a; . "$0"; set +a; }; exec "$@"'
"""launchd has no environment file: the shell reads ours, if it exists, and then executes the program."""


def daemon_plan(program: Path, user: str, home: Path) -> ServicePlan:
    """Plans the service of a Mac, which runs without a login as the user whose models it uses."""
    return _plan(program, Path("/Library/LaunchDaemons"), home, "system", user)


def agent_plan(program: Path, home: Path, uid: int) -> ServicePlan:
    """Plans the service of a user, which runs while that user is logged in."""
    return _plan(program, home / "Library" / "LaunchAgents", home, f"gui/{uid}", None)


def _plan(program: Path, folder: Path, home: Path, domain: str, user: str | None) -> ServicePlan:
    support = home / "Library" / "Application Support" / "exo-mesh"
    log = home / "Library" / "Logs" / "exo-mesh.log"
    plist, target = folder / f"{LABEL}.plist", f"{domain}/{LABEL}"
    env = template("settings.env", restart=f"launchctl kickstart -k {target}")
    content = job(program, support / "service.env", log, home, user)
    notes = []
    if user is None:
        notes.append("macOS 15 and later ask once whether the node may find devices on the local network: allow it")
    return ServicePlan(
        name=LABEL,
        files=(
            ServiceFile(plist, plistlib.dumps(content, sort_keys=False).decode()),
            ServiceFile(support / "service.env", env, is_own=True, mode=0o600, owner=user or ""),
        ),
        stale=(),
        before=(ServiceStep(("launchctl", "enable", target)),),
        # launchd reads a plist only when the job is loaded, so an update unloads and loads it
        start=(
            ServiceStep(("launchctl", "bootout", target), may_fail=True),
            ServiceStep(("launchctl", "bootstrap", domain, str(plist))),
        ),
        offline=(),
        stop=(ServiceStep(("launchctl", "bootout", target), may_fail=True),),
        after=(),
        state=("launchctl", "print", target),
        logs=f"tail -f '{log}'",
        kept=(support, log),
        notes=tuple(notes),
    )


def job(program: Path, env: Path, log: Path, home: Path, user: str | None) -> dict[str, Any]:
    """The keys of the launchd.plist(5)."""
    owner = {} if user is None else {"UserName": user}
    return {
        "Label": LABEL,
        **owner,
        "ProgramArguments": ["/bin/sh", "-c", START, str(env), str(program), "serve", "--log-format", "json"],
        "EnvironmentVariables": {"PATH": PATH},
        "WorkingDirectory": str(home),
        "RunAtLoad": True,
        # restart after a crash, but not after `exo-mesh node stop`
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": THROTTLE_S,
        "ExitTimeOut": STOP_S,
        # launchd slows down jobs of other types in favour of the programs on the screen
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": MAX_FILES},
        "HardResourceLimits": {"NumberOfFiles": MAX_FILES},
        "Umask": 0o077,
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }


def print_state(output: str) -> tuple[bool, str]:
    """(whether it runs, its state in one line), from the output of `launchctl print`."""
    found = dict(line.strip().partition(" = ")[::2] for line in output.splitlines() if " = " in line)
    state = found.get("state", "unknown")
    parts = [state, *([f"pid {found['pid']}"] if "pid" in found else [])]
    if found.get("last exit code", "0") not in ("0", "(never exited)"):
        parts.append(f"last exit code {found['last exit code']}")
    return state == "running", ", ".join(parts)
