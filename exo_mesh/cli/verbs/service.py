"""Run a node as a service of this machine, or with --user of your account: systemd on Linux, launchd on macOS.

sudo exo-mesh service install           install it for this machine; it starts now and at each boot
exo-mesh service install --user         install your own service, with your models and settings
exo-mesh service install --dry-run      print the files and commands, change nothing
exo-mesh service status                 show whether it runs, and files that differ from this version's
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
from exo_mesh.cli.parser import seconds
from exo_mesh.cli.services.applying import Installation, ServiceCommandError
from exo_mesh.cli.services.applying import run as run_command
from exo_mesh.cli.services.plan import ServicePlan
from exo_mesh.cli.tables import print_json, say
from exo_mesh.settings.config import ConfigError, home_of

MANAGERS = {"linux": "systemd", "darwin": "launchd"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `install`, `uninstall`, `status` and `wait`."""
    parts = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    texts = {
        "install": (_install, "install or update the service, and start it"),
        "uninstall": (_uninstall, "stop the service and remove its files; settings and models stay"),
        "status": (_status, "show whether it is installed and runs; exit code 1 if it does not"),
        "wait": (_wait, "wait until a port is open; for service units"),
    }
    for name, (action, text) in texts.items():
        part = parts.add_parser(name, help=text, description=text)
        part.set_defaults(verb=action)
        if name == "wait":
            part.add_argument("address", metavar="HOST:PORT", help="the port to wait for")
            part.add_argument(
                "--for", dest="for_s", type=seconds, default=30.0, metavar="SECONDS", help="how long to wait (30)"
            )
            continue
        _add_place(part)
        if name == "status":
            part.add_argument("--json", action="store_true", help="print JSON")
        if name == "install":
            part.add_argument("--dry-run", action="store_true", help="print the files and commands, change nothing")
            part.add_argument("--no-start", action="store_true", help="do not start it now, only at the next boot")
            text = "also install a unit for RKLLAMA that runs this rkllama_server"
            part.add_argument("--rkllama", metavar="FILE", help=text)


def _add_place(part: argparse.ArgumentParser) -> None:
    """Adds the flags that select the service and its place."""
    text = "macOS, without --user: account of the node; by default your account, also under sudo"
    part.add_argument("--user", action="store_true", help="a service of your account, not of the machine")
    part.add_argument("--manager", choices=("systemd", "launchd"), help="service manager; by default this machine's")
    part.add_argument("--run-as", metavar="USER", help=text)
    text = "the exo-mesh program to start; by default this environment's"
    part.add_argument("--program", metavar="FILE", help=text)
    text = "install into the system image in this directory; nothing is started"
    part.add_argument("--root", default="/", metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen action."""
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
        say(
            "users may not create namespaces here, which the sandbox of the service needs: retrying without the sandbox"
        )
        plan = _plan(args, can_sandbox=False)
        Installation(plan, root, print).install(start=True, is_running=lambda: _state(plan)[0])
    for note in plan.notes:
        say(f"note: {note}")
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
                print(f"  {path}: {state}; run `exo-mesh service install` to write this version's file")
        print(f"log: {plan.logs}")
    return exit_codes.OK if is_running or (is_installed and root != Path("/")) else exit_codes.FAILED


def _wait(args: argparse.Namespace) -> int:
    from exo_mesh.cli.services.waiting import wait_for_port

    if wait_for_port(args.address, args.for_s):
        print(f"{args.address} is open")
        return exit_codes.OK
    print(f"{args.address} is not open after {args.for_s:g} s")
    return exit_codes.FAILED


def _manager(args: argparse.Namespace) -> str:
    found: str | None = args.manager or MANAGERS.get(sys.platform)
    if found is None:
        raise ConfigError(f"exo-mesh service needs systemd (Linux) or launchd (macOS); this is {sys.platform}")
    return found


def _root(args: argparse.Namespace) -> Path:
    root = Path(args.root).absolute()
    if not root.is_dir():
        raise ConfigError(f"--root {root}: there is no such directory")
    if root != Path("/") and args.user:
        raise ConfigError("--root works only for the service of a machine: leave out --user")
    return root


def _plan(args: argparse.Namespace, *, can_sandbox: bool = True) -> ServicePlan:
    """The plan of the chosen service. can_sandbox: whether a user's service may create namespaces, as far as known."""
    from exo_mesh.cli.services import launchd_plan, program, systemd_plan

    is_install = args.what == "install"
    found = Path(args.program).absolute() if args.program else program.own_program() if is_install else None
    # status compares the installed files with those of this environment, so a path that may not exist will do
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
    """Paths that the user of the system unit must be able to read. Raises ConfigError if --program cannot be run."""
    from exo_mesh.cli.services import program

    if not args.program:
        yield from program.needed_paths(path)
    elif _root(args) == Path("/"):
        if not os.access(path, os.X_OK):
            raise ConfigError(f"--program {path}: there is no such program")
        yield path


def _daemon_user(args: argparse.Namespace) -> tuple[str, Path]:
    """(name, home) of the user that a LaunchDaemon runs as."""
    import pwd

    name = args.run_as or os.environ.get("SUDO_USER") or (None if os.geteuid() == 0 else pwd.getpwuid(os.getuid())[0])
    if name is None:
        raise ConfigError("name the user that the node runs as, whose models it uses: --run-as NAME")
    try:
        return name, Path(pwd.getpwnam(name).pw_dir)
    except KeyError as exc:
        raise ConfigError(f"--run-as {name}: there is no such user") from exc


def _require_rights(args: argparse.Namespace, root: Path) -> None:
    """Raises ConfigError if the machine's service is changed without root, or a user's service with sudo."""
    is_root = os.geteuid() == 0
    if args.user and is_root and os.environ.get("SUDO_USER"):
        raise ConfigError("--user is for the service of your account: run it without sudo")
    if not args.user and not is_root and root == Path("/"):
        command = f"sudo {Path(sys.executable).parent / 'exo-mesh'} service {args.what}"
        raise ConfigError(
            f"the service of this machine belongs to root: run `{command}`, "
            f"or `exo-mesh service {args.what} --user` for a service of your own"
        )


def _require_manager(args: argparse.Namespace, root: Path) -> None:
    if _manager(args) == "systemd" and root == Path("/") and not Path("/run/systemd/system").is_dir():
        raise ConfigError(
            "systemd does not run on this machine, so no service can be installed: "
            "start `exo-mesh serve` with the init system of this machine, or see --dry-run and --root"
        )


def _failed_by_sandbox(plan: ServicePlan) -> bool:
    from exo_mesh.cli.services import systemd_plan

    if plan.name != systemd_plan.UNIT:
        return False
    return systemd_plan.exit_status(run_command(plan.state).stdout) in systemd_plan.SANDBOX_EXITS


def _state(plan: ServicePlan) -> tuple[bool, str]:
    """(whether it runs, its state in one line), from the service manager."""
    from exo_mesh.cli.services import launchd_plan, systemd_plan

    done = run_command(plan.state)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        return False, f"unknown ({said[-1] if said else f'exit code {done.returncode}'})"
    return (launchd_plan.print_state if plan.name == launchd_plan.LABEL else systemd_plan.state_line)(done.stdout)
