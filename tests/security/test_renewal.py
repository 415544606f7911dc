"""Certificates are renewed while nodes run: what is open stays open, and what begins later is let in."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from exo_mesh.errors import MeshError
from exo_mesh.node.node import Node
from exo_mesh.rings.hosting import certificate_renewal
from exo_mesh.rings.hosting.certificate_renewal import Renewal, utc_now
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.security import certificates
from exo_mesh.security.certificates import end_of, issue
from exo_mesh.security.credentials import Credentials, RenewedCredentials
from exo_mesh.security.secret import new_secret
from exo_mesh.wire.channels import bind, new_server, open_channel
from tests.support.nodes import (
    MODEL,
    SLOW,
    Machine,
    a_request,
    collect,
    instances,
    knows_all,
    make_node,
    mesh,
    runners,
    tokens,
    until,
)

SECRET = new_secret()


def serial_of(own: Credentials) -> int:
    return x509.load_pem_x509_certificate(own.certificate).serial_number


async def shown_serial(port: int, own: Credentials, folder: Path) -> int:
    """The serial number of the certificate that a server here shows to a new connection."""
    (folder / "own.pem").write_bytes(own.certificate + own.private_key)
    context = ssl.create_default_context(cadata=own.authority.decode())
    context.check_hostname = False
    context.load_cert_chain(folder / "own.pem")
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    return x509.load_der_x509_certificate(shown).serial_number


class Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def echo(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
            async for request in requests:
                yield request

        return grpc.stream_stream_rpc_method_handler(echo)


async def echoed(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> object:
    await call.write(b"x")
    async with asyncio.timeout(10):
        return await call.read()


async def is_let_in(port: int, own: RenewedCredentials) -> bool:
    async with open_channel(f"127.0.0.1:{port}", own) as channel:
        try:
            return await echoed(channel.stream_stream("/a/b")()) == b"x"
        except grpc.aio.AioRpcError as exc:
            assert exc.code() is grpc.StatusCode.UNAVAILABLE
            return False


@pytest.mark.extended
async def test_after_the_end_of_a_certificate_only_a_renewed_one_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "VALID", datetime.timedelta(seconds=3))
    now = utc_now()
    sides = {name: RenewedCredentials(issue(SECRET, name, ["127.0.0.1"], now)) for name in ("server", "client")}
    server = new_server()
    server.add_generic_rpc_handlers((Echo(),))
    port = bind(server, "127.0.0.1:0", sides["server"])
    await server.start()
    async with open_channel(f"127.0.0.1:{port}", sides["client"]) as channel:
        call = channel.stream_stream("/a/b")()
        assert await echoed(call) == b"x"
        ends = max(end_of(one.current) for one in sides.values())
        await until(lambda: utc_now() > ends + datetime.timedelta(seconds=1))
        assert not await is_let_in(port, sides["client"])
        monkeypatch.undo()
        sides["server"].replace(issue(SECRET, "server", ["127.0.0.1"], utc_now()))
        assert not await is_let_in(port, sides["client"]), "the client shows its old one"
        sides["client"].replace(issue(SECRET, "client", ["127.0.0.1"], utc_now()))
        assert await is_let_in(port, sides["client"])
        assert await echoed(call) == b"x", "what was open before has stayed open"
    await server.stop(0)


def renewal_of(node: Node) -> Renewal:
    assert node._parts.credentials is not None
    return Renewal(node.settings, node._parts.credentials, node.membership, node._hosting.host)


@pytest.mark.extended
async def test_nodes_and_runners_show_new_certificates_and_a_running_ring_notices_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mesh(tmp_path, 2, secret=SECRET, engine_options=SLOW) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        await until(lambda: [one.state for one in instances(nodes[1])] == ["ready"])
        (before,) = instances(nodes[1])
        expected = await tokens(nodes[1], a_request("undisturbed", 30))
        ports = [node.grpc_port for node in nodes]
        ports += [int(stage.endpoint.rpartition(":")[2]) for stage in before.stages]
        me = issue(SECRET, "test", [], utc_now())
        old = {await shown_serial(port, me, tmp_path) for port in ports}
        got: list[int] = []
        request = asyncio.create_task(collect(nodes[1], "disturbed", 30, got))
        await until(lambda: len(got) > 5)

        assert not any([await renewal_of(node).renew_if_due() for node in nodes]), "not yet"
        monkeypatch.setattr(certificates, "VALID", 3.1 * certificates.VALID)  # less than a third of it is left
        assert all([await renewal_of(node).renew_if_due() for node in nodes])
        assert not any([await renewal_of(node).renew_if_due() for node in nodes]), "once is enough"
        current = {serial_of(node._parts.credentials.current) for node in nodes if node._parts.credentials}
        assert not current & old
        for port in ports:
            async with asyncio.timeout(10):
                while await shown_serial(port, me, tmp_path) not in current:  # a runner hears of it over its pipe
                    await asyncio.sleep(0.01)
        await request
        assert got == expected and instances(nodes[1]) == [before]
        assert await tokens(nodes[1], a_request("after", 30)) == expected
        assert set(runners()) == {stage.pid for stage in before.stages}


@pytest.mark.slow
async def test_a_mesh_outlives_its_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With certificates of five seconds, for three times as long, and then another node comes."""
    monkeypatch.setattr(certificates, "VALID", datetime.timedelta(seconds=5))
    monkeypatch.setattr(certificate_renewal, "LOOK_EVERY_S", 0.2)
    async with mesh(tmp_path, 2, secret=SECRET, engine_options=SLOW) as nodes:
        await nodes[0].instances.create(InstanceSpec(MODEL, min_peers=2))
        await until(lambda: [one.state for one in instances(nodes[1])] == ["ready"])
        (before,) = instances(nodes[1])
        begun, got = utc_now(), list[int]()
        request = asyncio.create_task(collect(nodes[1], "long", 1000, got))
        await until(lambda: utc_now() - begun > 3 * certificates.VALID, 30)
        assert not request.done() or request.exception() is None
        bootstrap = (f"127.0.0.1:{nodes[0].grpc_port}",)
        late = make_node(tmp_path / "late", "late", Machine(), secret=SECRET, bootstrap_peers=bootstrap)
        await late.start()
        try:
            await until(lambda: knows_all(late, 3))
            assert len(await tokens(late, a_request("late"))) == 12
        finally:
            await late.stop()
        await request
        assert len(got) == 1000 and instances(nodes[1]) == [before]


@pytest.mark.extended
async def test_a_runner_that_ends_just_now_is_no_error(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1, secret=SECRET) as (node,):
        await node.instances.create(InstanceSpec(MODEL))
        (runner,) = node._hosting.host._runners.values()
        stopping = asyncio.create_task(runner.stop())
        await until(runner._gone.is_set)
        with pytest.raises(MeshError):
            await runner.link("127.0.0.1:1")
        await node._hosting.host.show_new_certificate()
        await stopping
