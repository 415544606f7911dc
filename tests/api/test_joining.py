"""Invitations over HTTP: who runs the node makes them, and only who has the code gets anything."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.api.joining import MAX_BODY_BYTES
from exo_mesh.api.web.qr import qr_rows
from exo_mesh.errors import NoInvitationError, TransportError, WrongCodeError
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role
from exo_mesh.security.invitations import Invitations
from exo_mesh.security.joiner import fetch
from exo_mesh.security.joining import Gift, parse_password
from exo_mesh.security.local_token import PREFIX
from exo_mesh.security.secret import new_secret
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.security.relay import Recorder, said

GIFT = Gift(new_secret(), "default", "studio", "192.168.1.5:5000")
WRONG = "aaaa-bbbb-cccc"
TOKEN = PREFIX + "A" * 43
HERE = {"Authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def inviting(mesh: ScriptedMesh, gift: Gift | None = GIFT) -> AsyncIterator[tuple[Served, Invitations]]:
    invitations = Invitations(gift, lambda: ("192.168.1.5:52415",))
    access = AccessPolicy(needs_key=gift is not None, local_token=TOKEN)
    options = ApiOptions(access=access, invitations=invitations)
    async with served(mesh, options) as api:
        yield api, invitations


async def invite(api: Served) -> str:
    """The password of a new invitation."""
    async with api.http.post("/v1/invite", json={}, headers=HERE) as reply:
        assert reply.status == 201
        (code,) = (await reply.json())["codes"]
    address, _, password = code.rpartition("/")
    assert address == "192.168.1.5:52415"
    return str(password)


async def state(api: Served) -> str:
    async with api.http.get("/v1/invite", headers=HERE) as reply:
        return str((await reply.json())["state"])


async def test_the_other_machine_gets_the_secret_and_the_line_carries_none_of_it(mesh: ScriptedMesh) -> None:
    async with inviting(mesh) as (api, _):
        assert await state(api) == "none"
        password = await invite(api)
        assert await state(api) == "open"
        port = int(api.url.rpartition(":")[2])
        async with Recorder(port).listening() as line:
            assert await asyncio.to_thread(fetch, f"http://127.0.0.1:{line.port}", password, "laptop") == GIFT
        heard = b"".join(map(said, line.sessions)) + bytes(line.answers)
        assert b"laptop" in heard and b"sealed" in heard
        for hidden in (GIFT.secret, GIFT.node, password, parse_password(password)):
            assert hidden.encode() not in heard
        async with api.http.get("/v1/invite", headers=HERE) as reply:
            told = await reply.json()
        assert (told["state"], told["joined"]) == ("joined", "laptop") and password not in str(told)
        with pytest.raises(NoInvitationError, match="it was used"):
            await asyncio.to_thread(fetch, api.url, password, "another")


async def test_wrong_codes_are_counted_and_the_fifth_ends_it(mesh: ScriptedMesh) -> None:
    async with inviting(mesh) as (api, _):
        password = await invite(api)
        for said_left in ("4 tries are left", "3 tries", "2 tries", "1 try is left", "the invitation has ended"):
            with pytest.raises(WrongCodeError, match=said_left):
                await asyncio.to_thread(fetch, api.url, WRONG, "guesser")
        assert await state(api) == "wrong_codes"
        with pytest.raises(NoInvitationError):
            await asyncio.to_thread(fetch, api.url, password, "laptop")


async def test_a_withdrawn_invitation_is_over(mesh: ScriptedMesh) -> None:
    async with inviting(mesh) as (api, _):
        password = await invite(api)
        async with api.http.delete("/v1/invite", headers=HERE) as reply:
            assert (await reply.json())["state"] == "withdrawn"
        with pytest.raises(NoInvitationError):
            await asyncio.to_thread(fetch, api.url, password, "laptop")


async def test_an_open_mesh_says_that_it_has_no_secret(mesh: ScriptedMesh) -> None:
    async with inviting(mesh, None) as (api, _), api.http.post("/v1/invite", json={}, headers=HERE) as reply:
        error = (await reply.json())["error"]
        assert reply.status == 400 and "exo-mesh secret new" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"hello": 1}',
        b'{"hello": "!", "name": "x"}',
        b'{"hello": "QQ==", "name": "x"}',
        b'{"hello": "QQ==", "name": "x", "more": "y"}',
        b'{"exchange": "x"}',
        b'{"exchange": "x", "proof": "\xff"}',
        json.dumps({"hello": "A" * MAX_BODY_BYTES, "name": "x"}).encode(),
        b"[" * MAX_BODY_BYTES,
    ],
    ids=lambda body: repr(body[:30]),
)
async def test_nonsense_is_refused_and_is_no_try(mesh: ScriptedMesh, body: bytes) -> None:
    async with inviting(mesh) as (api, invitations):
        password = await invite(api)
        async with api.http.post("/v1/join", data=body) as reply:
            assert reply.status == 400
        assert invitations.current().num_wrong == 0
        assert await asyncio.to_thread(fetch, api.url, password, "laptop") == GIFT


async def test_a_server_that_is_no_node_is_one_clear_error(mesh: ScriptedMesh) -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 28\r\n\r\n{"hello": "AAAA", "sealed":1}'[:-1])
        writer.close()

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(TransportError):
        await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}", WRONG, "laptop")
    server.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 201),
        ({"X-Forwarded-For": "192.168.1.9", "X-Forwarded-Proto": "https"}, 201),
        ({"X-Forwarded-For": "192.168.1.9"}, 403),
        ({"X-Forwarded-Proto": "http"}, 403),
        ({"Forwarded": "for=192.168.1.9;proto=https"}, 403),
    ],
)
async def test_an_admin_key_invites_only_where_nobody_reads_the_reply(
    mesh: ScriptedMesh, tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    keys = KeyFile(tmp_path / FILE_NAME)
    admin, _ = keys.add(Role.ADMIN, datetime.datetime.now(datetime.UTC))
    options = ApiOptions(access=AccessPolicy(keys, True), invitations=Invitations(GIFT, lambda: ("10.0.0.5:52415",)))
    async with served(mesh, options) as api:
        headers = {**headers, "Authorization": f"Bearer {admin}"}
        async with api.http.post("/v1/invite", headers=headers) as reply:
            told = await reply.json()
            assert reply.status == status
            if status == 403:
                assert "only over HTTPS" in told["error"]["message"] and "codes" not in told
                assert options.invitations.last is None
            else:
                assert reply.headers["Cache-Control"] == "no-store"
                assert told["command"] == f"exo-mesh join {told['codes'][0]}"
                assert told["qr"] == qr_rows(told["command"])
