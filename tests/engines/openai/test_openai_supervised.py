"""A llama-server of our own: started for one model, watched, ended, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from exo_mesh_openai import provider, supervised, tied
from exo_mesh_openai.engine import OpenAiEngine
from exo_mesh_openai.options import read_options
from exo_mesh_openai.supervised import SupervisedServer

from exo_mesh.engine.whole import WholeLoadRequest
from exo_mesh.errors import EngineError, ModelError, StageLostError
from tests.support.openai_engine import chat, collect
from tests.support.stub_llama_server import ROOT, write_stub

DEADLINE_S = 10.0


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    models = tmp_path / "models"
    models.mkdir()
    for manner in ("ok", "broken", "stubborn", "slow"):
        (models / f"{manner}.gguf").write_text(f"{manner} model")
    return {"binary": str(write_stub(tmp_path / "llama-server")), "models_dir": str(models)}


@contextlib.asynccontextmanager
async def started(options: dict[str, str], model: str) -> AsyncIterator[OpenAiEngine]:
    (report,) = await provider.look(options)
    (found,) = [one for one in report.models if one.served_name == model]
    engine = OpenAiEngine()
    try:
        await engine.load(WholeLoadRequest(found, options), lambda done, total: None)
        yield engine
    finally:
        await engine.close()


_OTHERS: set[int] = set()
"""Processes that other tests of this worker have started, and that are still there."""


@pytest.fixture(autouse=True)
def of_this_test() -> None:
    _OTHERS.clear()
    _OTHERS.update(one.pid for one in psutil.Process().children(recursive=True))


def children() -> list[psutil.Process]:
    found = [one for one in psutil.Process().children(recursive=True) if one.pid not in _OTHERS]
    return [one for one in found if one.status() != psutil.STATUS_ZOMBIE]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_it_serves_its_model_until_it_is_closed(options: dict[str, str]) -> None:
    async with started(options, "ok.gguf") as engine:
        pieces, _ = await collect(engine, chat())
        assert len(pieces) == 12 and engine.slots == 3 and engine.continues
        assert engine.memory_bytes() > 1 << 20
        await engine.check()
        (child,) = children()
        assert "--jinja" in child.cmdline() and "127.0.0.1" in child.cmdline()
    assert not children()


async def test_progress_ends_at_the_size_of_the_file(options: dict[str, str]) -> None:
    seen: list[tuple[int, int]] = []
    own = read_options(options).own
    assert own is not None
    server = SupervisedServer(own)
    await server.start("ok.gguf", lambda done, total: seen.append((done, total)))
    await server.close()
    assert seen[0] == (0, 8) and seen[-1] == (8, 8) and seen == sorted(seen)


async def test_a_program_that_cannot_load_its_model_says_why(options: dict[str, str]) -> None:
    with pytest.raises(EngineError, match=r"exit code 1.*has no tensors.*while it loaded broken\.gguf"):
        async with started(options, "broken.gguf"):
            pass
    assert not children()


async def test_a_load_that_takes_too_long_is_ended(options: dict[str, str]) -> None:
    own = read_options(options).own
    assert own is not None
    with pytest.raises(EngineError, match=r"within 0\.5 s"):
        await SupervisedServer(own, load_s=0.5).start("slow.gguf", lambda done, total: None)
    assert not children()


async def test_a_killed_program_is_a_lost_stage_with_its_last_words(options: dict[str, str]) -> None:
    async with started(options, "ok.gguf") as engine:
        events = engine.generate(chat(max_tokens=1000))
        await anext(events)
        (child,) = children()
        child.kill()
        with pytest.raises(StageLostError):
            async for _ in events:
                pass
        await until(lambda: not children())
        with pytest.raises(EngineError, match=r"exit code -9: build: stub"):
            await engine.check()
        with pytest.raises(StageLostError, match="exit code -9"):
            await collect(engine, chat())


async def test_a_program_that_ignores_sigterm_is_killed(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "TERM_S", 0.1)
    async with started(options, "stubborn.gguf"):
        assert len(children()) == 1
    assert not children()


async def test_the_program_serves_nobody_without_its_key(options: dict[str, str]) -> None:
    import aiohttp

    own = read_options(options).own
    assert own is not None
    server = SupervisedServer(own)
    address = await server.start("ok.gguf", lambda done, total: None)
    async with aiohttp.ClientSession() as session, session.get(f"{address.base}/v1/models") as reply:
        assert reply.status == 401
    await server.close()


@pytest.mark.parametrize("wrong", ["../models/ok.gguf", "none.gguf"])
async def test_only_listed_models_are_started(options: dict[str, str], wrong: str) -> None:
    own = read_options(options).own
    assert own is not None
    with pytest.raises(ModelError, match="has no model"):
        await SupervisedServer(own).start(wrong, lambda done, total: None)


@pytest.mark.parametrize("way", ["draft_simple", "draft_eagle3", "draft_mtp"])
async def test_a_missing_draft_model_is_named(options: dict[str, str], tmp_path: Path, way: str) -> None:
    missing = tmp_path / "draft.gguf"
    with pytest.raises(ModelError, match=str(missing)):
        async with started({**options, "spec_type": way, "draft_model": str(missing)}, "ok.gguf"):
            pass


def ends_within_2_s(process: psutil.Process) -> bool:
    """Whether it ends; it may stay a zombie, because nobody here is its parent any more."""
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
                continue
        return True
    return False


PARENT = """
import asyncio, sys
from exo_mesh_openai.options import read_options
from exo_mesh_openai.supervised import SupervisedServer

async def main():
    server = SupervisedServer(read_options({"binary": sys.argv[1], "models_dir": sys.argv[2]}).own)
    await server.start("ok.gguf", lambda done, total: None)
    print(server._process.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a child with its parent on Linux only")
def test_the_program_does_not_outlive_a_parent_that_is_killed(options: dict[str, str]) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "engines")])}
    command = [sys.executable, "-c", PARENT, options["binary"], options["models_dir"]]
    parent = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    program = psutil.Process(int(parent.stdout.readline()))
    assert program.is_running()
    parent.kill()
    parent.communicate()
    assert ends_within_2_s(program)


def test_without_the_kernels_help_the_program_is_watched() -> None:
    """The way of systems that are not Linux: a process between the two ends the program when the parent is gone."""
    watcher = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'engines')!r}); sys.path.insert(0, {str(ROOT)!r})\n"
        "import os; from exo_mesh_openai import tied; tied.POLL_S = 0.05\n"
        "sys.exit(tied.watch(os.getppid(), sys.argv[1:]))"
    )
    middle = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(3600)"
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"
    command = [sys.executable, "-c", middle, sys.executable, "-c", watcher, sys.executable, "-c", program]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert ends_within_2_s(child)
    parent.stdout.close()


def test_a_watched_program_passes_on_its_exit_code() -> None:
    assert tied.watch(os.getppid(), [sys.executable, "-c", "raise SystemExit(7)"]) == 7
