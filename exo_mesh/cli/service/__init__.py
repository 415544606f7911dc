"""Run a node as a service: systemd on Linux, launchd on macOS; of the machine, or with --user of one person.

sudo exo-mesh service install           the service of this machine; starts now and at each boot
exo-mesh service install --user         your own service, with your models and settings
exo-mesh service install --dry-run      print the files and commands, change nothing
exo-mesh service status                 is it installed, as this version would, and does it run?
exo-mesh service uninstall              stop it and remove its files; settings and models stay
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from exo_mesh.cli import exit_codes
from exo_mesh.cli.tables import print_json
from exo_mesh.services.applying import Installation, ServiceCommandError
from exo_mesh.services.applying import run as run_command
from exo_mesh.services.plan import ServicePlan
from exo_mesh.settings.config import ConfigError, home_of

MANAGERS = {"linux": "systemd", "darwin": "launchd"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `install`, `uninstall`, `status` and `wait`."""
    parts = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    texts = {
        "install": (_install, "install the service, or bring an installed one up to date, and start it"),
        "uninstall": (_uninstall, "stop the service and remove its files; settings and models stay"),
        "status": (_status, "whether it is installed and runs; exit code 1 if it does not"),
        "wait": (_wait, "wait until a port is open; for units"),
    }
    for name, (action, text) in texts.items():
        part = parts.add_parser(name, help=text, description=text)
        part.set_defaults(verb=action)
        if name == "wait":
            part.add_argument("address", metavar="HOST:PORT", help="what is waited for")
            part.add_argument("--for", dest="for_s", type=float, default=30.0, metavar="SECONDS", help="how long (30)")
            continue
        _add_place(part)
        if name == "status":
            part.add_argument("--json", action="store_true", help="print JSON")
        if name == "install":
            part.add_argument("--dry-run", action="store_true", help="print the files and commands, change nothing")
            part.add_argument("--no-start", action="store_true", help="start it at the next boot, not now")
            text = "make a unit for RKLLAMA, too, which runs this rkllama_server"
            part.add_argument("--rkllama", metavar="FILE", help=text)


def _add_place(part: argparse.ArgumentParser) -> None:
    """Which service is meant, and where it is."""
    text = "macOS, without --user: who the node runs as; by default who calls sudo"
    part.add_argument("--user", action="store_true", help="a service of your own, not of the machine")
    part.add_argument("--manager", choices=("systemd", "launchd"), help="by default that of this machine")
    part.add_argument("--run-as", metavar="USER", help=text)
    text = "the exo-mesh to start; that of this environment by default"
    part.add_argument("--program", metavar="FILE", help=text)
    text = "work on the system in this directory, such as an image; nothing is started"
    part.add_argument("--root", default="/", metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    verb: Callable[[argparse.Namespace], int] = args.verb
    return verb(args)


def _install(args: argparse.Namespace) -> int:
    plan, root = _plan(args), _root(args)
    installation = Installation(plan, root, print)
    if args.dry_run:
        installation.dry_run()
        return exit_codes.OK
    _require_rights(args, root)
    _require_manager(args, root)
    try:
        installation.install(start=not args.no_start, is_running=lambda: _state(plan)[0])
    except ServiceCommandError:
        if not args.user or not _failed_by_sandbox(plan):
            raise
        print("the sandbox of the service needs namespaces, which users may not make here: again without")
        plan = _plan(args, can_sandbox=False)
        Installation(plan, root, print).install(start=True, is_running=lambda: _state(plan)[0])
    for note in plan.notes:
        print(f"note: {note}")
    print(f"log: {plan.logs}")
    return exit_codes.OK


def _uninstall(args: argparse.Namespace) -> int:
    root = _root(args)
    _require_rights(args, root)
    Installation(_plan(args), root, print).uninstall()
    return exit_codes.OK


def _status(args: argparse.Namespace) -> int:
    plan, root = _plan(args), _root(args)
    installation = Installation(plan, root, print)
    found = {str(installation.where(file.path)): installation.differs(file) for file in plan.files if not file.is_own}
    is_installed = installation.differs(plan.unit) != "missing"
    is_running, line = _state(plan) if is_installed and root == Path("/") else (False, "not installed")
    if args.json:
        shown: dict[str, Any] = {"installed": is_installed, "running": is_running, "state": line, "files": found}
        print_json(shown)
    else:
        print(f"{plan.name}: {line if root == Path('/') else 'installed' if is_installed else 'not installed'}")
        for path, state in found.items():
            if is_installed and state != "same":
                print(f"  {path}: {state}; `exo-mesh service install` writes it as this version has it")
        print(f"log: {plan.logs}")
    return exit_codes.OK if is_running or (is_installed and root != Path("/")) else exit_codes.FAILED


def _wait(args: argparse.Namespace) -> int:
    from exo_mesh.services.waiting import wait_for_port

    if wait_for_port(args.address, args.for_s):
        print(f"{args.address} is open")
        return exit_codes.OK
    print(f"nobody listens at {args.address} after {args.for_s:g} s")
    return exit_codes.FAILED


def _manager(args: argparse.Namespace) -> str:
    found: str | None = args.manager or MANAGERS.get(sys.platform)
    if found is None:
        raise ConfigError(f"services are of systemd (Linux) or launchd (macOS); this is {sys.platform}")
    return found


def _root(args: argparse.Namespace) -> Path:
    root = Path(args.root).absolute()
    if not root.is_dir():
        raise ConfigError(f"--root: there is no directory {root}")
    if root != Path("/") and args.user:
        raise ConfigError("--root is for the service of a machine, without --user")
    return root


def _plan(args: argparse.Namespace, *, can_sandbox: bool = True) -> ServicePlan:
    """The service that was asked for. can_sandbox: as far as is known, the service of a person can have namespaces."""
    from exo_mesh.services import launchd_plan, program, systemd_plan

    is_install = args.what == "install"
    found = Path(args.program).absolute() if args.program else program.own_program() if is_install else None
    # files are compared with what this environment would install; without a program there is nothing to compare
    path = found or Path(sys.executable).parent / "exo-mesh"
    if _manager(args) == "launchd":
        if args.user:
            return launchd_plan.agent_plan(path, Path.home(), os.getuid())
        return launchd_plan.daemon_plan(path, *_daemon_user(args))
    if args.user:
        import platformdirs

        config_home = platformdirs.user_config_path()
        can_sandbox = can_sandbox and not systemd_plan.no_namespaces_file(config_home).exists()
        return systemd_plan.user_plan(path, config_home, home_of({}), can_sandbox=can_sandbox)
    if is_install:
        program.require_readable(_needed(args, path))
    rkllama = Path(args.rkllama).absolute() if is_install and args.rkllama else None
    return systemd_plan.system_plan(path, _root(args), rkllama)


def _needed(args: argparse.Namespace, path: Path) -> Iterator[Path]:
    """What the system unit's user has to be able to read; in an image, what of it is there."""
    from exo_mesh.services import program

    if not args.program:
        yield from program.needed_paths(path)
    elif _root(args) == Path("/"):
        if not os.access(path, os.X_OK):
            raise ConfigError(f"--program: there is no program {path}")
        yield path


def _daemon_user(args: argparse.Namespace) -> tuple[str, Path]:
    """(name, home) of the user as whom a LaunchDaemon runs."""
    import pwd

    name = args.run_as or os.environ.get("SUDO_USER") or (None if os.geteuid() == 0 else pwd.getpwuid(os.getuid())[0])
    if name is None:
        raise ConfigError("say as which user the node runs, whose models it uses: --run-as NAME")
    try:
        return name, Path(pwd.getpwnam(name).pw_dir)
    except KeyError as exc:
        raise ConfigError(f"--run-as: there is no user {name}") from exc


def _require_rights(args: argparse.Namespace, root: Path) -> None:
    """Raises ConfigError where the service of a machine is changed without root, or a person's by sudo."""
    is_root = os.geteuid() == 0
    if args.user and is_root and os.environ.get("SUDO_USER"):
        raise ConfigError("--user is a service of your own: run it without sudo")
    if not args.user and not is_root and root == Path("/"):
        command = f"sudo {Path(sys.executable).parent / 'exo-mesh'} service {args.what}"
        raise ConfigError(
            f"the service of this machine belongs to root: run `{command}`, "
            f"or `exo-mesh service {args.what} --user` for a service of your own"
        )


def _require_manager(args: argparse.Namespace, root: Path) -> None:
    if _manager(args) == "systemd" and root == Path("/") and not Path("/run/systemd/system").is_dir():
        raise ConfigError(
            "systemd does not run on this machine, so there is nothing to install the service into: "
            "start `exo-mesh serve` from what starts programs here, or see --dry-run and --root"
        )


def _failed_by_sandbox(plan: ServicePlan) -> bool:
    from exo_mesh.services import systemd_plan

    if plan.name != systemd_plan.UNIT:
        return False
    return systemd_plan.exit_status(run_command(plan.state).stdout) in systemd_plan.SANDBOX_EXITS


def _state(plan: ServicePlan) -> tuple[bool, str]:
    """(it runs, one line about it) by the service manager."""
    from exo_mesh.services import launchd_plan, systemd_plan

    done = run_command(plan.state)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        return False, f"unknown ({said[-1] if said else f'exit code {done.returncode}'})"
    return (launchd_plan.print_state if plan.name == launchd_plan.LABEL else systemd_plan.state_line)(done.stdout)
