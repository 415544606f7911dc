"""Carries out the plan of a service: writes files, runs commands, and reports each."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from exo_mesh.cli.services.plan import Command, ServiceFile, ServicePlan, ServiceStep
from exo_mesh.errors import MeshError

COMMAND_S = 150.0
"""Longer than `systemctl restart`, which returns when the node is ready: TimeoutStopSec + TimeoutStartSec at most."""

Say = Callable[[str], None]


class ServiceCommandError(MeshError):
    """A command of the service manager failed."""

    code = "service_command_failed"


def run(command: Command) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end. Raises ServiceCommandError if it does not exist or does not end within COMMAND_S."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    except FileNotFoundError as exc:
        raise ServiceCommandError(f"the command {command[0]} does not exist on this machine") from exc
    except subprocess.TimeoutExpired as exc:
        raise ServiceCommandError(f"`{shlex.join(command)}` did not end within {COMMAND_S:.0f} s") from exc


class Installation:
    """Installs a plan below a root directory: "/", or the directory of a system image."""

    def __init__(self, plan: ServicePlan, root: Path, say: Say) -> None:
        self._plan = plan
        self._root = root
        self._say = say

    def where(self, path: Path) -> Path:
        """The path of a file of the plan below the root."""
        return path if self._root == Path("/") else self._root / path.relative_to("/")

    def differs(self, file: ServiceFile) -> str:
        """Compares a file of the plan with the disk: "missing", "changed" or "same"."""
        path = self.where(file.path)
        if not path.exists():
            return "missing"
        return "same" if path.read_text(encoding="utf-8", errors="replace") == file.text else "changed"

    def install(self, *, start: bool, is_running: Callable[[], bool]) -> None:
        """Writes changed files and runs the commands; restarts the service only if a file changed or it is down."""
        plan = self._plan
        has_changed = self._remove(plan.stale, "no longer needed")
        for file in plan.files:
            has_changed |= self._write(file)
        if self._root != Path("/"):
            self._steps(plan.offline)
            return
        self._steps(plan.before)
        if not start:
            self._say("not started (--no-start)")
        elif has_changed or not is_running():
            self._steps(plan.start)
        else:
            self._say("the service runs, and nothing has changed")

    def uninstall(self) -> None:
        """Stops the service and removes its files, except files that the user may have edited."""
        plan, is_here = self._plan, self._root == Path("/")
        if is_here:
            self._steps(plan.stop)
        self._remove([file.path for file in plan.files if not file.is_own], "")
        self._remove(plan.stale, "")
        if is_here:
            self._steps(plan.after)
        own = [file.path for file in plan.files if file.is_own]
        left = [str(self.where(path)) for path in (*own, *plan.kept) if self.where(path).exists()]
        if left:
            self._say(f"kept: {', '.join(left)}")

    def dry_run(self) -> None:
        """Reports what an installation would write and run."""
        plan = self._plan
        for file in plan.files:
            path, state = self.where(file.path), self.differs(file)
            kept = file.is_own and state != "missing"
            self._say(f"# {path} ({'kept' if kept else state if state == 'same' else 'to be written'})")
            if not kept:
                self._say(file.text)
        for path in plan.stale:
            if self.where(path).exists():
                self._say(f"$ rm {self.where(path)}")
        for step in (*plan.before, *plan.start) if self._root == Path("/") else plan.offline:
            self._say(f"$ {shlex.join(step.command)}")

    def _write(self, file: ServiceFile) -> bool:
        path, state = self.where(file.path), self.differs(file)
        if state != "missing" and (file.is_own or state == "same"):
            self._say(f"{'kept' if file.is_own else 'unchanged'}: {path}")
            return False
        made = [path]
        for folder in reversed([folder for folder in path.parents if not folder.exists()]):
            folder.mkdir()
            made.append(folder)
        fresh = path.with_name(f".{path.name}.new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file.mode)
        with open(descriptor, "w", encoding="utf-8") as stream:
            os.fchmod(descriptor, file.mode)
            stream.write(file.text)
        os.replace(fresh, path)
        for one in made if file.owner and os.geteuid() == 0 else ():
            shutil.chown(one, file.owner)
        self._say(f"wrote: {path}")
        return not file.is_own

    def _remove(self, paths: Iterable[Path], why: str) -> bool:
        found = [path for path in map(self.where, paths) if path.is_file() or path.is_symlink()]
        for path in found:
            path.unlink()
            self._say(f"removed: {path}{f' ({why})' if why else ''}")
            if path.parent.name.endswith(".service.d") and not any(path.parent.iterdir()):
                path.parent.rmdir()
        return bool(found)

    def _steps(self, steps: Iterable[ServiceStep]) -> None:
        for step in steps:
            self._say(f"$ {shlex.join(step.command)}")
            done = run(step.command)
            if done.returncode == 0:
                continue
            said = (done.stderr or done.stdout).strip().splitlines()
            why = said[0] if said else f"exit code {done.returncode}"
            if not step.may_fail:
                raise ServiceCommandError(f"`{shlex.join(step.command)}` failed: {why}; see {self._plan.logs}")
            self._say(f"  {why}")
