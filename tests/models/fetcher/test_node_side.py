"""The node's side of the fetcher: a child on demand that ends when it is idle, and does not outlive its node."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import psutil
import pytest

from exo_mesh.base.tasks import TaskOwner
from exo_mesh.errors import FetchError, UnknownModelError
from exo_mesh.models import fetching
from exo_mesh.models.fetcher import writing
from exo_mesh.models.fetcher.wire import Share, Source
from exo_mesh.models.fetching import HUB_SOURCE, Fetcher
from exo_mesh.settings.config import SECRET_VARIABLE
from exo_mesh.weights.fetched import read_manifest
from tests.models.fetcher.conftest import REPO
from tests.support.fetcher_child import fetcher_environ, is_same_model
from tests.support.hub import LoopbackHub
from tests.support.processes import eventually, gone


@pytest.fixture
async def tasks() -> AsyncIterator[TaskOwner]:
    owner = TaskOwner()
    yield owner
    await owner.close()


def everything(model_dir: Path) -> list[Share]:
    manifest = read_manifest(model_dir)
    assert manifest is not None
    return [Share({name: ((0, file.size),) for name, file in manifest.files.items()}, (HUB_SOURCE,))]


async def test_an_offline_node_says_so_and_starts_nothing(tmp_path: Path, tasks: TaskOwner) -> None:
    fetcher = Fetcher(tasks, is_offline=True)
    with pytest.raises(FetchError, match="org/m cannot be fetched: this node is offline") as refused:
        await fetcher.resolve("org/m", tmp_path / "m", repo="org/m")
    assert refused.value.is_final and "--offline" in refused.value.remedy
    with pytest.raises(FetchError, match="offline"):
        await fetcher.fetch(tmp_path / "m", [Share({}, (HUB_SOURCE,))])
    with pytest.raises(FetchError, match="offline"):
        await fetcher.search("x", 3)
    assert fetcher.pid is None
    await fetcher.close()


@pytest.mark.extended
async def test_a_model_is_resolved_and_fetched_with_progress(
    tmp_path: Path, hub: LoopbackHub, original: Path, tasks: TaskOwner
) -> None:
    environ = fetcher_environ(hub, tmp_path / "hf") | {SECRET_VARIABLE: "not for children"}
    fetcher = Fetcher(tasks, environ=environ)
    assert fetcher.pid is None, "nothing is started before it is needed"
    told: list[tuple[int, int, Mapping[str, int]]] = []
    with pytest.raises(UnknownModelError, match='no model "org/none"'):
        await fetcher.resolve("org/none", tmp_path / "none", repo="org/none")
    await fetcher.resolve(REPO, tmp_path / "m", repo=REPO)
    assert fetcher.pid is not None
    child = psutil.Process(fetcher.pid)
    assert SECRET_VARIABLE not in child.environ()
    fetcher.pace(is_busy=True)
    received = await fetcher.fetch(tmp_path / "m", everything(tmp_path / "m"), lambda *progress: told.append(progress))
    assert is_same_model(tmp_path / "m", original)
    assert told[-1][0] == told[-1][1] > told[0][0] and told[-1][2] == received
    assert [model.id for model in await fetcher.search("tiny", 3)] == [REPO]
    async with asyncio.timeout(10):
        await fetcher.close()
    assert gone([child])
    with pytest.raises(FetchError, match="this node stops"):
        await fetcher.search("tiny", 3)


@pytest.mark.extended
async def test_a_peer_that_cannot_be_read_from_leaves_the_hub(
    tmp_path: Path, hub: LoopbackHub, original: Path, tasks: TaskOwner
) -> None:
    fetcher = Fetcher(tasks, environ=fetcher_environ(hub, tmp_path / "hf"))
    peer = Source("p" * 8, ("http://127.0.0.1:9",))
    await fetcher.resolve(REPO, tmp_path / "m", repo=REPO, sources=(peer, HUB_SOURCE))
    shares = [Share(share.pieces, (peer, HUB_SOURCE)) for share in everything(tmp_path / "m")]
    assert set(await fetcher.fetch(tmp_path / "m", shares)) == {""}
    assert is_same_model(tmp_path / "m", original)
    offline = Fetcher(tasks, is_offline=True, environ=fetcher_environ(hub, tmp_path / "hf"))
    with pytest.raises(FetchError, match=r"peer pppppppp"):
        await offline.resolve(REPO, tmp_path / "other", repo=REPO, sources=(peer, HUB_SOURCE))
    await fetcher.close()
    await offline.close()


@pytest.mark.extended
async def test_a_crash_is_survived_once(tmp_path: Path, hub: LoopbackHub, original: Path, tasks: TaskOwner) -> None:
    fetcher = Fetcher(tasks, environ=fetcher_environ(hub, tmp_path / "hf"))
    await fetcher.resolve(REPO, tmp_path / "m", repo=REPO)
    hub.faults.hold.set()

    async def kill(previous: int | None = None) -> int:
        while fetcher.pid in (None, previous) or not hub.faults.hold.is_set():
            await asyncio.sleep(0.01)
        assert fetcher.pid is not None
        killed = fetcher.pid
        os.kill(killed, signal.SIGKILL)
        return killed

    async with asyncio.TaskGroup() as group:
        fetch = group.create_task(fetcher.fetch(tmp_path / "m", everything(tmp_path / "m")))
        await asyncio.sleep(0)
        await kill()
        hub.faults.hold.clear()
    await fetch
    assert is_same_model(tmp_path / "m", original)
    hub.faults.hold.set()
    search = asyncio.create_task(fetcher.resolve(REPO, tmp_path / "again", repo=REPO))
    await asyncio.sleep(0)
    await kill(await kill())
    with pytest.raises(FetchError, match="crashed twice"):
        await search
    hub.faults.hold.clear()
    await fetcher.resolve(REPO, tmp_path / "again", repo=REPO)
    await fetcher.close()


@pytest.mark.extended
async def test_an_idle_child_ends_and_another_one_comes(tmp_path: Path, hub: LoopbackHub, tasks: TaskOwner) -> None:
    fetcher = Fetcher(tasks, environ=fetcher_environ(hub, tmp_path / "hf"), idle_limit_s=0.05)
    asking = asyncio.create_task(fetcher.search("tiny", 3))
    while (pid := fetcher.pid) is None:
        await asyncio.sleep(0)
    await asking
    while fetcher.pid is not None or psutil.pid_exists(pid):
        await asyncio.sleep(0.01)
    assert await fetcher.search("tiny", 3)
    await fetcher.close()


@pytest.mark.extended
async def test_a_cancelled_call_is_cancelled_in_the_child_before_it_returns(
    tmp_path: Path, hub: LoopbackHub, original: Path, tasks: TaskOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "LOCK_LIMIT_S", 0.0)
    monkeypatch.setattr(fetching, "CANCEL_LIMIT_S", 30.0)
    fetcher = Fetcher(tasks, environ=fetcher_environ(hub, tmp_path / "hf"))
    await fetcher.resolve(REPO, tmp_path / "m", repo=REPO)
    hub.faults.pause_s = 0.05
    fetch = asyncio.create_task(fetcher.fetch(tmp_path / "m", everything(tmp_path / "m")))
    sent = hub.sent_bytes
    while hub.sent_bytes == sent:
        await asyncio.sleep(0.01)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    os.close(writing.lock_directory(tmp_path / "m"))  # nothing writes there any more
    hub.faults.pause_s = 0.0
    await fetcher.fetch(tmp_path / "m", everything(tmp_path / "m"))
    assert is_same_model(tmp_path / "m", original)
    await fetcher.close()


@pytest.mark.extended
async def test_a_cancelled_call_does_not_wait_for_a_child_that_hangs(
    tmp_path: Path, hub: LoopbackHub, original: Path, tasks: TaskOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "CANCEL_LIMIT_S", 0.05)
    fetcher = Fetcher(tasks, environ=fetcher_environ(hub, tmp_path / "hf"))
    await fetcher.resolve(REPO, tmp_path / "m", repo=REPO)
    assert fetcher.pid is not None
    os.kill(fetcher.pid, signal.SIGSTOP)
    try:
        fetch = asyncio.create_task(fetcher.fetch(tmp_path / "m", everything(tmp_path / "m")))
        await asyncio.wait((fetch,), timeout=0.05)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
    finally:
        os.kill(fetcher.pid, signal.SIGCONT)
    await fetcher.fetch(tmp_path / "m", everything(tmp_path / "m"))
    assert is_same_model(tmp_path / "m", original)
    await fetcher.close()


@pytest.mark.extended
async def test_a_hub_that_never_answers_is_not_waited_for(
    tmp_path: Path, hub: LoopbackHub, tasks: TaskOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetcher = Fetcher(tasks, environ=fetcher_environ(hub, tmp_path / "hf"))
    await fetcher.search("tiny", 3)
    hub.faults.hold.set()
    with monkeypatch.context() as patch, pytest.raises(FetchError, match=r"looking up .* took longer than 0.1 s"):
        patch.setattr(fetching, "RESOLVE_LIMIT_S", 0.1)
        await fetcher.resolve(REPO, tmp_path / "m", repo=REPO)
    hub.faults.hold.clear()
    await fetcher.resolve(REPO, tmp_path / "m", repo=REPO)
    await fetcher.close()


NODE = """
import asyncio, sys
from pathlib import Path
from exo_mesh.models.fetching import Fetcher
from exo_mesh.base.tasks import TaskOwner
async def main():
    fetcher = Fetcher(TaskOwner())
    task = asyncio.create_task(fetcher.resolve("org/tiny", Path(sys.argv[1]), repo="org/tiny"))
    while fetcher.pid is None:
        await asyncio.sleep(0.01)
    print(fetcher.pid, flush=True)
    await task
asyncio.run(main())
"""


@pytest.mark.extended
def test_a_fetcher_does_not_outlive_a_node_that_is_killed(tmp_path: Path, hub: LoopbackHub) -> None:
    hub.faults.hold.set()
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, str(tmp_path / "m")],
        stdout=subprocess.PIPE,
        text=True,
        env=fetcher_environ(hub, tmp_path / "hf"),
    )
    with node:
        assert node.stdout is not None
        child = psutil.Process(int(node.stdout.readline()))
        assert eventually(lambda: hub.requests["GET resolve"] > 0)
        node.kill()
    assert eventually(lambda: gone([child]), 2)
    hub.faults.hold.clear()


@pytest.mark.extended
async def test_a_token_that_is_given_while_it_runs_opens_a_gated_model(
    tmp_path: Path, hub: LoopbackHub, original: Path, tasks: TaskOwner
) -> None:
    hub.add("org/gated", original, gated="auto", tokens=frozenset({"hf_right"}))
    fetcher = Fetcher(tasks, environ=fetcher_environ(hub, tmp_path / "hf"))
    with pytest.raises(FetchError, match="this node has none"):
        await fetcher.resolve("org/gated", tmp_path / "m", repo="org/gated")
    fetcher.authorize("hf_wrong")
    with pytest.raises(FetchError, match="the token that was given to this node"):
        await fetcher.resolve("org/gated", tmp_path / "m", repo="org/gated")
    fetcher.authorize("hf_right")
    await fetcher.resolve("org/gated", tmp_path / "m", repo="org/gated")
    fetcher.authorize("")
    with pytest.raises(FetchError, match="this node has none"):
        await fetcher.resolve("org/gated", tmp_path / "other", repo="org/gated")
    await fetcher.close()
