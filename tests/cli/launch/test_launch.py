"""`exo-mesh launch`: agents get the mesh's address, a key and a model for one run, and nothing is left behind."""

from __future__ import annotations

import asyncio
import datetime
import fcntl
import json
import os
import signal
import stat
import sys
import termios
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.cli.verbs.launch import agent_environ, certificates
from exo_mesh.cli.verbs.launch.agents import AGENTS, AgentSetup, LaunchTarget
from exo_mesh.cli.verbs.launch.mesh_access import UNKNOWN_CONTEXT, LaunchModel, find_launch_model
from exo_mesh.errors import PlacementError
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

FAKE = Path(__file__).with_name("fake_agent.py")
NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)
DEADLINE_S = 60.0


@dataclass
class Desk:
    """A machine with fake agents on its PATH, and an API to which they are launched."""

    api: Served
    root: Path
    keys: KeyFile

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def report_file(self) -> Path:
        return self.root / "report.json"

    @property
    def runs(self) -> list[Path]:
        """The directories of runs."""
        folder = self.home / "launch"
        return list(folder.iterdir()) if folder.exists() else []

    @property
    def num_keys(self) -> int:
        return len(self.keys.read())

    async def start(self, *words: str, terminal: int | None = None, **environ: str) -> asyncio.subprocess.Process:
        """Start the verb; terminal: the descriptor of one that becomes its controlling terminal."""
        ends = {
            "stdin": asyncio.subprocess.DEVNULL if terminal is None else terminal,
            "stdout": asyncio.subprocess.PIPE if terminal is None else terminal,
            "stderr": asyncio.subprocess.PIPE if terminal is None else terminal,
        }
        passed = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
        shown = {**passed, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "REPORT": str(self.report_file)}
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "exo_mesh.cli.main", "launch"),
            *(word for flag in (["--home", str(self.home)], ["--api-url", self.api.url]) for word in flag),
            *words,
            env={**shown, "HOME": str(self.root), **environ},
            start_new_session=terminal is not None,
            preexec_fn=None if terminal is None else take_terminal,
            **ends,
        )

    async def launch(self, *words: str, **environ: str) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)"""
        process = await self.start(*words, **environ)
        async with asyncio.timeout(DEADLINE_S):
            printed, errors = await process.communicate()
        assert process.returncode is not None
        return process.returncode, printed.decode(), errors.decode()

    async def report(self) -> dict[str, Any]:
        """What the agent reports, as soon as it does."""
        await until(self.report_file.exists)
        found: dict[str, Any] = json.loads(self.report_file.read_text())
        return found


def take_terminal() -> None:
    """Make standard input the controlling terminal of this session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def machine(root: Path) -> None:
    (root / "bin").mkdir()
    for agent in AGENTS.values():
        path = root / "bin" / agent.program
        path.write_text(f"#!{sys.executable}\n" + FAKE.read_text())
        path.chmod(0o755)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text-model"))


@pytest.fixture
async def open_desk(model_dir: Path, tmp_path: Path) -> AsyncIterator[Desk]:
    """At an open mesh."""
    machine(tmp_path)
    keys = KeyFile(tmp_path / FILE_NAME)
    async with served(ScriptedMesh(model_dir), ApiOptions(access=AccessPolicy(keys))) as api:
        yield Desk(api, tmp_path, keys)


@pytest.fixture
async def closed_desk(model_dir: Path, tmp_path: Path) -> AsyncIterator[Desk]:
    """At a closed mesh without keys."""
    machine(tmp_path)
    keys = KeyFile(tmp_path / FILE_NAME)
    async with served(ScriptedMesh(model_dir), ApiOptions(access=AccessPolicy(keys, needs_key=True))) as api:
        yield Desk(api, tmp_path, keys)


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_reaches_the_mesh_and_leaves_nothing_behind(open_desk: Desk, name: str) -> None:
    before = {path for path in open_desk.root.rglob("*") if "home" not in path.parts}
    code, _, errors = await open_desk.launch(name, "--", "Hello")
    report = await open_desk.report()
    assert code == 0 and report["status"] == 200, errors
    assert open_desk.api.mesh.request.prompt_ids and report["argv"][-1] == "Hello"
    assert open_desk.runs == [] and open_desk.num_keys == 0, "no key is made on an open mesh"
    assert {path for path in open_desk.root.rglob("*") if "home" not in path.parts} == before | {open_desk.report_file}


async def test_on_a_closed_mesh_a_key_is_made_and_revoked(closed_desk: Desk) -> None:
    admin, _ = closed_desk.keys.add(Role.ADMIN, NOW)
    code, _, errors = await closed_desk.launch("opencode", "--", "Hello", EXO_MESH_API_KEY=admin)
    report = await closed_desk.report()
    assert (code, report["status"]) == (0, 200), errors
    assert report["key"] != admin and closed_desk.keys.check(report["key"]) is None and closed_desk.num_keys == 1


async def test_a_key_that_can_make_no_other_is_used_itself(closed_desk: Desk) -> None:
    use, _ = closed_desk.keys.add(Role.USE, NOW)
    code, _, errors = await closed_desk.launch("claude", "--", "Hello", EXO_MESH_API_KEY=use)
    assert (code, (await closed_desk.report())["key"]) == (0, use), errors
    assert closed_desk.keys.check(use) is not None, "it is not revoked"


async def test_without_a_key_a_closed_mesh_refuses_and_says_how_to_get_one(closed_desk: Desk) -> None:
    code, _, errors = await closed_desk.launch("claude", "--", "Hello")
    assert code != 0 and "EXO_MESH_API_KEY" in errors and not closed_desk.report_file.exists()


async def test_the_exit_code_of_the_agent_is_passed_on(open_desk: Desk) -> None:
    assert (await open_desk.launch("claude", "--", "EXIT 7"))[0] == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
async def test_a_signal_ends_the_agent_and_the_run_is_undone(closed_desk: Desk, number: signal.Signals) -> None:
    admin, _ = closed_desk.keys.add(Role.ADMIN, NOW)
    process = await closed_desk.start("aider", "--", "WAIT", EXO_MESH_API_KEY=admin)
    report = await closed_desk.report()
    (run,) = closed_desk.runs
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in run.iterdir())
    process.send_signal(number)
    async with asyncio.timeout(DEADLINE_S):
        await process.communicate()
    assert process.returncode != 0 and closed_desk.runs == []
    assert closed_desk.keys.check(report["key"]) is None and closed_desk.num_keys == 1


async def test_ctrl_c_ends_the_agent_and_the_run_is_undone(open_desk: Desk) -> None:
    """The terminal sends SIGINT to the agent itself."""
    keyboard, terminal = os.openpty()
    try:
        process = await open_desk.start("aider", "--", "WAIT", terminal=terminal)
        assert (await open_desk.report())["tty"] is True
        os.write(keyboard, b"\x03")
        async with asyncio.timeout(DEADLINE_S):
            await process.wait()
    finally:
        os.close(terminal)
        os.close(keyboard)
    assert process.returncode == 128 + signal.SIGINT and open_desk.runs == []


async def test_after_a_kill_the_next_launch_revokes_the_key_and_removes_the_files(closed_desk: Desk) -> None:
    admin, _ = closed_desk.keys.add(Role.ADMIN, NOW)
    process = await closed_desk.start("aider", "--", "WAIT", EXO_MESH_API_KEY=admin)
    report = await closed_desk.report()
    (run,) = closed_desk.runs
    process.kill()
    await until(lambda: process.returncode is not None)  # its pipes stay open: the agent has them
    assert run.exists() and closed_desk.keys.check(report["key"]) is not None
    closed_desk.report_file.unlink()
    await closed_desk.launch("claude", "--", "Hello", EXO_MESH_API_KEY=admin)
    assert run.exists(), "the agent still runs and reads its files"
    os.kill(agent_of(run), signal.SIGKILL)
    await until(lambda: not holds_lock(run))
    await closed_desk.launch("claude", "--", "Hello", EXO_MESH_API_KEY=admin)
    assert closed_desk.runs == [] and closed_desk.num_keys == 1


def agent_of(run: Path) -> int:
    """The process that has a file of the run on its command line."""
    (found,) = [one.pid for one in psutil.process_iter(["cmdline"]) if str(run) in " ".join(one.info["cmdline"] or [])]
    return found


def holds_lock(run: Path) -> bool:
    with (run / "lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


async def test_an_agent_that_is_not_installed_is_named_with_its_package(open_desk: Desk) -> None:
    (open_desk.root / "bin" / "crush").unlink()
    code, _, errors = await open_desk.launch("crush", PATH=str(open_desk.root / "bin"))
    assert code != 0 and "npm install -g @charmland/crush" in errors


async def test_an_unknown_agent_is_refused_with_the_list(open_desk: Desk) -> None:
    code, _, errors = await open_desk.launch("clod")
    assert code != 0 and all(name in errors for name in AGENTS)


async def test_an_unknown_model_is_refused_before_anything_starts(open_desk: Desk) -> None:
    code, _, errors = await open_desk.launch("claude", "--model", "nope")
    assert code != 0 and "nope" in errors and not open_desk.report_file.exists() and open_desk.runs == []


async def test_several_models_need_a_choice(open_desk: Desk) -> None:
    open_desk.api.mesh.names = ("exo-mesh-demo", "other")
    code, _, errors = await open_desk.launch("claude")
    assert code != 0 and "--model" in errors and "other" in errors


async def test_a_context_that_is_too_small_is_warned_about(open_desk: Desk) -> None:
    code, _, errors = await open_desk.launch("claude", "--", "Hello")
    assert code == 0 and "need about 32000 tokens" in errors and "256 tokens of context" in errors


async def test_print_shows_what_would_be_set_and_starts_nothing(closed_desk: Desk) -> None:
    admin, _ = closed_desk.keys.add(Role.ADMIN, NOW)
    code, shown, _ = await closed_desk.launch("claude", "--print", "--", "-p", "a b", EXO_MESH_API_KEY=admin)
    assert code == 0 and closed_desk.num_keys == 1 and closed_desk.runs == []
    assert f"export ANTHROPIC_BASE_URL={closed_desk.api.url}" in shown and "unset ANTHROPIC_API_KEY" in shown
    assert shown.endswith("claude -p 'a b'\n") and admin not in shown


async def test_without_a_name_the_agents_are_listed(open_desk: Desk) -> None:
    code, shown, _ = await open_desk.launch()
    assert code == 0 and all(f"\n{name} " in shown for name in AGENTS)


def target(context: int) -> LaunchTarget:
    return LaunchTarget("http://127.0.0.1:1", "k", "org/model", context, Path("/run"))


@pytest.mark.parametrize("context", [2048, 8192, 32_768, 262_144])
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_never_plans_with_more_tokens_than_the_model_has(name: str, context: int) -> None:
    one = target(context)
    assert one.output_tokens + 256 < one.context_tokens and one.compact_tokens < one.context_tokens
    setup = AGENTS[name].setup(one)
    environ, text = setup.environ, json.dumps([*setup.environ.values(), *setup.arguments, *setup.files.values()])
    assert "org/model" in text
    if name == "claude":
        share, window = environ["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"], environ["CLAUDE_CODE_AUTO_COMPACT_WINDOW"]
        assert int(share) * int(window) // 100 <= one.compact_tokens
    elif name not in ("qwen",):  # Qwen Code has no setting for it
        assert str(context) in text


def test_the_users_environment_stays_but_for_what_leads_elsewhere() -> None:
    given = {"PATH": "/bin", "ANTHROPIC_API_KEY": "sk-1", "NO_PROXY": "a.example", "HTTPS_PROXY": "http://p"}
    setup = AGENTS["claude"].setup(target(8192))
    environ = agent_environ(given, setup, "http://10.0.0.5:52415")
    assert environ["PATH"] == "/bin" and "ANTHROPIC_API_KEY" not in environ
    assert environ["NO_PROXY"] == "a.example,10.0.0.5" and environ["no_proxy"] == "10.0.0.5"
    assert agent_environ({}, AgentSetup({"A": "b"}), "http://[::1]:1")["A"] == "b"


def test_the_pages_for_people_name_every_agent() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    verb, clients = ((docs / page).read_text() for page in ("reference/cli.md", "tasks/clients.md"))
    for agent in AGENTS.values():
        assert f"| `{agent.name}` |" in verb and agent.install.removeprefix("see ") in verb
        assert f"exo-mesh launch {agent.name}" in clients and f"[{agent.title}]" in clients


def test_an_agent_trusts_the_certificate_of_the_node_besides_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.pem"
    own.write_text("-----BEGIN CERTIFICATE-----\nown\n")
    monkeypatch.setenv("EXO_MESH_API_CA", str(own))
    assert certificates("https://node:52415", None).endswith(own.read_text())
    assert certificates("http://node:52415", None) == ""
    monkeypatch.delenv("EXO_MESH_API_CA")
    assert certificates("https://node:52415", None) == "", "the system's authorities are enough"


class Listing:
    """A client of a node with one model."""

    def __init__(self, **entry: Any) -> None:
        self.entry = {"id": "org/model", "context_length": 8192, "instance_ids": [], "status": "downloaded", **entry}
        self.instances = [{"id": "i1", "context_limit": 4096}, {"id": "i2", "context_limit": 2048}]
        self.previews: list[dict[str, Any]] = []

    def get(self, path: str, *_: float) -> Any:
        if path.startswith("/instance/previews?model=org%2Fmodel"):
            return {"previews": self.previews}
        return {"/v1/models": {"data": [self.entry]}, "/v1/models/org/model": self.entry}.get(path) or {
            "view": {"instances": self.instances}
        }


@pytest.mark.parametrize(
    ("entry", "context"),
    [
        ({"instance_ids": ["i1"]}, 4096),
        ({"instance_ids": ["i1", "i2"]}, 2048),
        ({"status": "served"}, 8192),
        ({"status": "served", "context_length": 0}, UNKNOWN_CONTEXT),
    ],
)
def test_the_context_of_an_agent_is_that_of_the_smallest_instance(entry: dict[str, Any], context: int) -> None:
    for name in ("", "org/model"):
        assert find_launch_model(cast(Any, Listing(**entry)), name).context_tokens == context


def test_a_model_that_is_not_loaded_must_fit_and_gets_the_context_that_fits() -> None:
    listing = Listing()
    listing.previews = [{"refused": {"message": "it needs 9 GB"}}, {"context_limit": 1024}]
    assert find_launch_model(cast(Any, listing), "org/model") == LaunchModel("org/model", 1024, is_loaded=False)
    listing.previews = listing.previews[:1]
    with pytest.raises(PlacementError, match="it needs 9 GB"):
        find_launch_model(cast(Any, listing), "org/model")
