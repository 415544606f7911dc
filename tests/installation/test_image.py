"""The image of the Dockerfile, built by buildah on a bare Debian, and a node that runs from it as process 1."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.installation.checkout import copy_checkout
from tests.installation.conftest import CERTIFICATES, BareSystem

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@dataclass(frozen=True)
class Image:
    root: Path
    config: dict[str, Any]

    def inside(self, argv: list[str]) -> list[str]:
        """A command in the root of the image with its environment and its user."""
        user, group = self.config["User"].split(":")
        drop = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs"]
        return [*drop, "env", "-i", "HOME=/var/lib/exo-mesh", *self.config["Env"], *argv]


class Builder:
    """buildah with storage of its own, which ends with the tests."""

    def __init__(self, scratch: Path) -> None:
        buildah = shutil.which("buildah")
        if buildah is None:
            pytest.skip("buildah is not installed")
        self._base = [buildah, "--root", str(scratch / "root"), "--runroot", str(scratch / "run")]

    def __call__(self, *args: str | Path) -> str:
        command = [*self._base, *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout.strip()


@pytest.fixture(scope="module")
def image(copy_of_bare_root: Callable[[], BareSystem], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    scratch = tmp_path_factory.mktemp("image")
    build = Builder(scratch)
    root = copy_of_bare_root().root
    (root / "etc/pip.conf").write_text(f"[global]\ncert = /{CERTIFICATES}\n")
    base = build("from", "scratch")
    build("copy", base, root, "/")
    build("commit", "--rm", base, "localhost/bare-python")
    shutil.rmtree(root)
    lent = [f"--build-arg={name}" for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL") if name in os.environ]
    how = ["--isolation", "chroot", "--network", "host", "--format", "docker"]
    build(
        "bud",
        *how,
        "--build-arg",
        "BASE=localhost/bare-python",
        *lent,
        "-t",
        "localhost/exo-mesh",
        copy_checkout(scratch / "tree"),
    )
    container = build("from", "localhost/exo-mesh")
    config = json.loads(build("inspect", "--type", "image", "localhost/exo-mesh"))["Docker"]["config"]
    yield Image(Path(build("mount", container)), config)
    build("rm", "--all")
    build("rmi", "--all", "--force")
    shutil.rmtree(scratch)


@pytest.fixture(scope="module")
def node(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[psutil.Process]:
    """Process 1 of a container, as ENTRYPOINT and CMD say, on a network of its own that is only the loopback."""
    log = tmp_path_factory.mktemp("node") / "log"
    argv = image.inside([*image.config["Entrypoint"], *image.config["Cmd"]])
    namespaces = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--root",
        str(image.root),
        "--mount-proc=/proc",
    ]
    command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *namespaces, *argv]
    with log.open("w") as output:
        started = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while '"event": "ready"' not in log.read_text():
            assert started.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield psutil.Process(started.pid).children()[0]
    finally:
        started.kill()
        started.wait()


def enter(node: psutil.Process, image: Image, *argv: str) -> subprocess.CompletedProcess[str]:
    """As `docker exec`."""
    command = [
        "nsenter",
        "--target",
        str(node.pid),
        "--net",
        "--pid",
        "--mount",
        "--root",
        "--wd",
        *image.inside([*argv]),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_it_answers_and_is_healthy(node: psutil.Process, image: Image) -> None:
    kind, *check = image.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    assert enter(node, image, *check).returncode == 0
    answer = enter(node, image, "exo-mesh", "run", "exo-mesh-demo", "Count from 7 to 12.")
    assert answer.stdout.strip() == "7, 8, 9, 10, 11, 12", answer.stderr


def test_it_is_no_root_and_writes_into_its_volume_only(node: psutil.Process, image: Image) -> None:
    assert {process.uids().real for process in [node, *node.children(recursive=True)]} == {10001}
    assert list(image.config["Volumes"]) == ["/var/lib/exo-mesh"]
    refused = enter(node, image, "sh", "-c", "echo > /opt/exo-mesh/here")
    assert refused.returncode != 0


def test_orphans_do_not_stay_as_zombies(node: psutil.Process, image: Image) -> None:
    enter(node, image, "sh", "-c", "sleep 0.2 &")
    deadline = time.monotonic() + 20
    while [one for one in node.children(recursive=True) if one.name() == "sleep"]:
        assert time.monotonic() < deadline, "process 1 does not wait for orphans"
        time.sleep(0.1)


def test_it_stops_at_its_stop_signal(node: psutil.Process, image: Image) -> None:
    node.send_signal(signal.Signals[image.config["StopSignal"]])
    node.wait(timeout=20)
