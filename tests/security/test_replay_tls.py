"""What two nodes said to each other over mutual TLS, recorded on the way and said again: nothing comes of it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from exo_mesh.mesh.membership.admission import Admission
from exo_mesh.mesh.membership.messages import HelloReply, HelloRequest
from exo_mesh.node.node import Node
from exo_mesh.security.secret import new_secret
from exo_mesh.wire import handshake_counter
from tests.security.relay import Recorder, replay, said
from tests.support.nodes import Machine, a_request, make_node, tokens, until


class Callers:
    """The names of all who have said hello to any node."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        answer = Admission.answer_hello

        async def answer_hello(admission: Admission, request: HelloRequest, caller_host: str) -> HelloReply:
            self.names.append(request.peer.name)
            return await answer(admission, request, caller_host)

        patch.setattr(Admission, "answer_hello", answer_hello)


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> Callers:
    return Callers(monkeypatch)


def seen(node: Node) -> tuple[str, list[str]]:
    """What a stranger would want to change."""
    view = node.observation.state().view
    return view.view_digest, [peer.id for peer in view.peers]


async def record(tmp_path: Path, secret: str, work: bool) -> tuple[Node, Node, Recorder]:
    """Two nodes, of which the second has found the first through a machine in the middle and talked to it."""
    one = make_node(tmp_path / "one", "one", Machine(), secret=secret)
    await one.start()
    recorder = Recorder(one.grpc_port)
    async with recorder.listening():
        bootstrap = (f"127.0.0.1:{recorder.port}",)
        two = make_node(tmp_path / "two", "two", Machine(), secret=secret, bootstrap_peers=bootstrap)
        await two.start()
        await until(lambda: all(len(node.membership.peers) == 1 for node in (one, two)))
        if work:
            await tokens(two, a_request())
        await until(lambda: seen(one) == seen(two))
    return one, two, recorder


async def say_again(recorder: Recorder, port: int) -> list[bytes]:
    """Every session, in every way, and some at the same time."""
    ways = [(session, in_step) for session in recorder.sessions for in_step in (False, True)]
    return await asyncio.gather(*(replay(session, port, in_step=in_step) for session, in_step in ways * 3))


@pytest.mark.extended
async def test_a_session_between_two_nodes_said_again_changes_nothing(
    tmp_path: Path, callers: Callers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(handshake_counter, "PATIENCE_S", 1.0)
    secret = new_secret()
    one, two, recorder = await record(tmp_path, secret, work=True)
    try:
        longest = max(recorder.sessions, key=lambda session: len(said(session)))
        assert len(said(longest)) > 2000 and not any(b"exo_mesh." in said(session) for session in recorder.sessions)
        assert "two" in callers.names, "the hello went over the wire that was recorded"
        before, heard = seen(one), len(callers.names)

        answers = await say_again(recorder, one.grpc_port)
        assert any(answers), "the server takes part in the handshake, and the rest does not fit its answer"
        assert seen(one) == before == seen(two) and len(callers.names) == heard
        assert len(await tokens(one, a_request("after"))) == 12

        # nor is a peer that has gone called back by its own words
        await two.stop()
        await until(lambda: one.membership.peers == [])
        before, heard = seen(one), len(callers.names)
        await say_again(recorder, one.grpc_port)
        assert seen(one) == before and callers.names[heard:] == []
        assert len(await tokens(one, a_request("alone"))) == 12

        def refusals() -> list[str]:
            return [text for text in caplog.messages if "they did not prove that they know this mesh's secret" in text]

        await until(refusals)
        assert len(refusals()) == 1

        bootstrap = (f"127.0.0.1:{one.grpc_port}",)
        third = make_node(tmp_path / "two", "two", Machine(), secret=secret, bootstrap_peers=bootstrap)
        await third.start()
        try:
            await until(lambda: len(one.membership.peers) == 1 and seen(one) == seen(third))
        finally:
            await third.stop()
    finally:
        await asyncio.gather(one.stop(), two.stop())


@pytest.mark.extended
async def test_in_an_open_mesh_the_same_words_are_heard(tmp_path: Path, callers: Callers) -> None:
    """The test above would prove nothing if what it sends could not be understood in the first place."""
    one, two, recorder = await record(tmp_path, "", work=False)
    try:
        await until(lambda: seen(one) == seen(two))
        heard = len(callers.names)
        await say_again(recorder, one.grpc_port)
        assert "two" in callers.names[heard:]
    finally:
        await asyncio.gather(one.stop(), two.stop())
