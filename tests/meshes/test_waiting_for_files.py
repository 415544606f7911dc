"""A chat request for a model that is still at the hub: it waits for the files, hears how far they are, and answers."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import pytest

from exo_mesh.cli.client.child_node import running_node
from tests.support.hub import LoopbackHub
from tests.support.peers import chat_body, text_of
from tests.support.processes import QUIET_FLAGS, clean_environ

DEMO = "org/demo"
LIMIT_S = 3
FLAGS = [*QUIET_FLAGS, "--api-port", "0", "--engine", "numpy", "--queue-timeout", f"{LIMIT_S}", "--prefill-timeout",
         f"{LIMIT_S}", "--response-timeout", f"{LIMIT_S}"]  # fmt: skip


@pytest.mark.extended
def test_a_request_outlasts_a_fetch_that_takes_longer_than_every_limit(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with LoopbackHub() as hub:
        hub.add(DEMO, Path(str(resources.files("exo_mesh.weights") / "shipped" / "exo-mesh-demo")))
        environ = {**clean_environ(home), **hub.environment, "HF_HOME": str(home / "hf")}
        with running_node(home, FLAGS, environ) as node:
            api = node.api
            api.get(f"/instance/previews?model={DEMO}", 60)  # headers come fast, so that the test is not longer
            hub.faults.pause_s = 0.3  # for each of some 120 pieces, 8 at once
            body = chat_body("Count from 7 to 12.", model=DEMO)
            began = time.monotonic()
            comments: list[tuple[float, str]] = []
            with ThreadPoolExecutor(1) as pool:
                plain = pool.submit(api.post, "/v1/chat/completions", body, 60)
                stream = api.stream(
                    "/v1/chat/completions",
                    {**body, "stream": True},
                    lambda text: comments.append((time.monotonic(), text)),
                )
                answer = "".join(event["choices"][0]["delta"].get("content") or "" for event in stream)
                assert answer == "7, 8, 9, 10, 11, 12" == text_of(plain.result())
    told = [(at, found) for at, text in comments if (found := re.fullmatch(r"fetching (\d+) % of \d+ MB", text))]
    shares = [int(found[1]) for _, found in told]
    assert told[-1][0] - began > LIMIT_S, comments
    assert len(set(shares)) >= 2 and shares == sorted(shares) and shares[-1] <= 100, comments
