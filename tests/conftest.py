"""What holds for all tests."""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import hypothesis
import pytest

from exo_mesh.mesh.membership.paths import PathKeeper
from exo_mesh.wire.channels import keep_poller
from tests.support import warm

if TYPE_CHECKING:
    from tests.support.questions import Reference

NO_HUB = "http://127.0.0.1:9"
"""Nobody listens there: no test asks a hub on the internet. Those that need one start one (tests/support/hub.py)."""


PARTS = 45
"""How many parts the slow tests have; `.ci/run` runs one part, so that all of it ends within 30 minutes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        type=int,
        choices=range(PARTS),
        help=f"run one of {PARTS} parts of the chosen tests, by a hash of their names",
    )


def write_bytecode() -> None:
    """Let this process and its children keep what they compile, whatever PYTHONDONTWRITEBYTECODE says.

    A run imports the same modules in hundreds of processes, and pytest rewrites the assertions of 600. Without bytecode
    the quick tests take 1.7 times as much CPU.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


write_bytecode()  # now, because pytest imports test modules soon after this one


def pytest_configure() -> None:
    """Prepares this process and what its children inherit: signals, the hub, homes, and warm processes."""
    # a shell starts what it puts into the background with Ctrl-C ignored
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["HF_ENDPOINT"] = NO_HUB
    warm.install()
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="exo-mesh-tests-")  # nodes name their homes in there
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
    hypothesis.settings.register_profile("any machine", deadline=None)  # how long an example takes is no truth to test
    hypothesis.settings.load_profile("any machine")
    asyncio.run(keep_poller())


def pytest_unconfigure() -> None:
    warm.end()


def names_no_wanted_mark(markexpr: str, text: str) -> bool:
    """Whether a file with this text has no test that `-m` asks for: tests get these marks by name, or all tests of a
    file by `pytestmark`."""
    wanted = [] if " or " in markexpr else [word for word in markexpr.split(" and ") if word in ("extended", "slow")]
    return any(mark not in text for mark in wanted) and "pytestmark" not in text


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without such a test: their imports are a third of what each process of a run spends on these."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return names_no_wanted_mark(config.option.markexpr, collection_path.read_text("utf-8")) or None


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is None:
        return
    others = [item for item in items if crc32(item.nodeid.encode()) % PARTS != part]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]


def pytest_collection_finish() -> None:
    """The test modules and the libraries live to the end. Without this each full collection of garbage looks at all of
    their objects, which takes 0.2 to 0.4 s, and many tests ask for one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Every verb sets up logging for its process; here the process goes on."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test does it: otherwise the direct way might win before the model is placed."""
    monkeypatch.setattr(PathKeeper, "_is_due", lambda self, peer: False)


@pytest.fixture(scope="session")
def whole() -> Reference:
    """What mlx-lm itself generates greedily from the questions to the demo model."""
    from tests.support.questions import Reference

    return Reference()
