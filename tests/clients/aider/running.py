"""Runs aider once, unmodified and without a terminal, in a fresh git repository."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

FILE = "greet.py"
LIMIT_S = 240
MODEL = "editor"
QUIET = ["--no-analytics", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes"]
AUTHOR = {"GIT_AUTHOR_NAME": "Ann", "GIT_AUTHOR_EMAIL": "ann@example.com"}
COMMITTER = {"GIT_COMMITTER_NAME": "Ann", "GIT_COMMITTER_EMAIL": "ann@example.com"}


@dataclass(frozen=True)
class Edit:
    """A file with two words, and which of them aider is asked to change to another."""

    first: str
    second: str
    new: str
    changes_second: bool

    @property
    def old(self) -> str:
        return self.second if self.changes_second else self.first

    @property
    def request(self) -> str:
        return f"Change {self.old} to {self.new}."

    @property
    def before(self) -> str:
        return file_with(self.first, self.second)

    @property
    def after(self) -> str:
        return file_with(self.first, self.new) if self.changes_second else file_with(self.new, self.second)

    @property
    def answer(self) -> str:
        """A right answer, in aider's format of whole files."""
        return f"I will change {self.old} to {self.new}.\n\n{FILE}\n```\n{self.after}```"

    @property
    def commit_title(self) -> str:
        return f"fix: change {self.old} to {self.new}"


def file_with(first: str, second: str) -> str:
    return f'def greet(name):\n    return "{first} " + name\n\n\ndef part(name):\n    return "{second} " + name\n'


@dataclass(frozen=True)
class Edited:
    """What aider left behind."""

    printed: str
    content: str
    titles: list[str]


def run_aider(program: str, folder: Path, url: str, edit: Edit, *, model: str, streams: bool) -> Edited:
    """Ask aider at `url` for the edit of the one file of a new repository in `folder`.

    aider streams only when it prints colours, so these two are switched together.
    """
    repository, home = folder / "repository", folder / "home"
    repository.mkdir(parents=True)
    home.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    api = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "unused"}
    environ = {**kept, **AUTHOR, **COMMITTER, **api, "HOME": str(home)}

    def run(*argv: str) -> str:
        done = subprocess.run(
            argv, cwd=repository, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{argv[0]} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    (repository / FILE).write_text(edit.before)
    run("git", "init", "-q")
    run("git", "add", FILE)
    run("git", "commit", "-q", "-m", "Add a greeting")
    manner = ["--stream", "--pretty"] if streams else ["--no-stream", "--no-pretty"]
    flags = ["--model", f"openai/{model}", "--edit-format", "whole", "--yes-always", *QUIET, *manner]
    printed = run(program, *flags, "--message", edit.request, FILE)
    titles = run("git", "log", "--format=%s", "--", FILE).splitlines()
    return Edited(printed, (repository / FILE).read_text(), titles)
