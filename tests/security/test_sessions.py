"""Sessions of the page: made from the local token, accepted by every member of the closed mesh, for some hours."""

from __future__ import annotations

import datetime
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.cli import exit_codes
from exo_mesh.cli.main import main
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role
from exo_mesh.security.keys import session_key
from exo_mesh.security.local_token import PREFIX as LOCAL
from exo_mesh.security.secret import new_secret
from exo_mesh.security.sessions import MAX_KNOWN, SKEW_S, VALID_S, PageSessions, number_of
from tests.api.scripted_mesh import ScriptedMesh, Served, served
from tests.text.text_models import write_text_model

NOW = 1_800_000_000.0
KEY = session_key(new_secret())
TOKEN = LOCAL + "A" * 43


def sessions(home: Path, key: bytes = KEY, now: float = NOW) -> PageSessions:
    return PageSessions(key, KeyFile(home / FILE_NAME), lambda: now)


def test_every_member_accepts_a_session_and_no_other_mesh_does(tmp_path: Path) -> None:
    text, made = sessions(tmp_path / "alpha").make()
    assert sessions(tmp_path / "beta").check(text) == made
    assert sessions(tmp_path / "other", session_key(new_secret())).check(text) is None
    assert number_of(made.id) and made.ends_at == NOW + VALID_S
    assert len(_parts(text)[3]) == 43, "256 bits"


@pytest.mark.parametrize(
    ("later_s", "valid"),
    [(0, True), (VALID_S - 1, True), (VALID_S, False), (-SKEW_S, True), (-SKEW_S - 1, False), (-1e9, False)],
)
def test_it_ends_after_some_hours_whatever_the_clock_of_a_member_says(
    tmp_path: Path, later_s: float, valid: bool
) -> None:
    text, _ = sessions(tmp_path).make()
    assert bool(sessions(tmp_path, now=NOW + later_s).check(text)) is valid


def test_no_changed_text_is_a_session(tmp_path: Path) -> None:
    text, _ = sessions(tmp_path).make()
    here = sessions(tmp_path)
    head, number, end, signature = _parts(text)
    assert here.check(f"{head}-{number}-{end}-{signature}")
    for changed in (
        f"{head}-{'0' * 8}-{end}-{signature}",
        f"{head}-{number}-{int(end, 16) + 60:x}-{signature}",
        f"{head}-{number}-0{end}-{signature}",
        f"{head}-{number}-{end}-{'A' * 43}",
        f"{head}-{number}-{end}-",
        text[:-1],
        f"{text}A",
        "",
        "\udcff",
    ):
        assert here.check(changed) is None


def _parts(text: str) -> tuple[str, str, str, str]:
    """(beginning, number, end, signature), of which the signature may have dashes."""
    exo, session, number, end, signature = text.split("-", 4)
    return f"{exo}-{session}", number, end, signature


def test_a_revoked_one_is_refused_and_not_renewed(tmp_path: Path) -> None:
    here = sessions(tmp_path)
    text, made = here.make()
    again, same = here.make(made.id)
    assert same.id == made.id and here.check(again)
    KeyFile(tmp_path / FILE_NAME).refuse(number_of(made.id), datetime.datetime.now(datetime.UTC))
    assert here.check(text) is None and here.check(again) is None and here.known() == []
    assert here.make(made.id)[1].id != made.id


def test_a_damaged_file_of_keys_makes_every_session_invalid(tmp_path: Path) -> None:
    here = sessions(tmp_path)
    text, _ = here.make()
    (tmp_path / FILE_NAME).write_text("[")
    assert here.check(text) is None


def test_a_flood_of_sessions_is_remembered_up_to_a_bound(tmp_path: Path) -> None:
    here = sessions(tmp_path)
    for _ in range(MAX_KNOWN + 10):
        here.make()
    assert len(here.known()) == MAX_KNOWN


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("text-model"))


def policy(home: Path, secret_key: bytes | None = KEY, **more: Any) -> AccessPolicy:
    keys = KeyFile(home / FILE_NAME)
    return AccessPolicy(
        keys, needs_key=secret_key is not None, sessions=PageSessions(secret_key, keys) if secret_key else None, **more
    )


async def asked(api: Served, method: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
    async with api.http.request(method, path, headers={"Authorization": f"Bearer {key}"}, json=body) as reply:
        return reply.status, await reply.json()


async def test_a_page_keeps_its_rights_at_another_member(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    alpha = ApiOptions(access=policy(tmp_path / "alpha", local_token=TOKEN))
    beta = ApiOptions(access=policy(tmp_path / "beta", local_token=LOCAL + "B" * 43))
    async with served(ScriptedMesh(model_dir), alpha) as at_alpha, served(ScriptedMesh(model_dir), beta) as at_beta:
        assert (await asked(at_beta, "GET", "/state", TOKEN))[0] == 401
        status, made = await asked(at_alpha, "POST", "/v1/session", TOKEN)
        assert (status, made["valid_s"]) == (200, VALID_S)
        assert (await asked(at_beta, "GET", "/state", made["key"]))[0] == 200
        assert (await asked(at_beta, "POST", "/drain", made["key"]))[0] == 200, "it may what an admin may"
        hello = (await asked(at_beta, "GET", "/metrics/snapshot", made["key"]))[1]
        assert hello["caller"] == {"role": "admin", "key": made["id"], "may_download": True}
        listed = (await asked(at_beta, "GET", "/v1/keys", made["key"]))[1]["data"]
        assert [(one["id"], one["object"], one["is_yours"]) for one in listed] == [(made["id"], "session", True)]
        renewed = (await asked(at_alpha, "POST", "/v1/session", TOKEN, {"id": made["id"]}))[1]
        assert renewed["id"] == made["id"]
        assert (await asked(at_alpha, "POST", "/v1/session", TOKEN, {"id": "x"}))[0] == 400
        assert (await asked(at_beta, "DELETE", f"/v1/keys/{made['id']}", made["key"]))[0] == 200
        assert (await asked(at_beta, "GET", "/state", made["key"]))[0] == 401
    said = caplog.text + json.dumps([record.__dict__ for record in caplog.records], default=str)
    assert made["id"] in said
    assert made["key"] not in said and renewed["key"] not in said and made["key"].rsplit("-", 1)[1] not in said


async def test_only_the_local_token_is_exchanged(model_dir: Path, tmp_path: Path) -> None:
    access = policy(tmp_path, local_token=TOKEN)
    assert access.keys is not None and access.sessions is not None
    admin, _ = access.keys.add(Role.ADMIN, datetime.datetime.now(datetime.UTC))
    session, _ = access.sessions.make()
    async with served(ScriptedMesh(model_dir), ApiOptions(access=access)) as api:
        for shown, status in ((admin, 403), (session, 403), ("", 401), (TOKEN, 200)):
            assert (await asked(api, "POST", "/v1/session", shown))[0] == status


async def test_an_open_mesh_makes_no_session_and_accepts_none(model_dir: Path, tmp_path: Path) -> None:
    text, _ = sessions(tmp_path).make()
    async with served(ScriptedMesh(model_dir), ApiOptions(access=policy(tmp_path, None, local_token=TOKEN))) as api:
        assert await asked(api, "POST", "/v1/session", TOKEN) == (200, {"object": "session", "key": None})
        assert (await asked(api, "POST", "/drain", text))[0] == 403, "as without a key"
        assert (await asked(api, "POST", "/drain", TOKEN))[0] == 200


def test_the_verb_key_revokes_a_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXO_MESH_SECRET", new_secret())
    here = PageSessions(KEY, KeyFile(tmp_path / FILE_NAME))
    text, made = here.make()
    assert here.check(text)
    assert main(["key", "remove", made.id, "--home", str(tmp_path)]) == exit_codes.OK
    assert capsys.readouterr().err == f"revoked the session {made.id}\n"
    assert here.check(text) is None
    assert main(["key", "remove", "s-12", "--home", str(tmp_path)]) != exit_codes.OK
    assert "no key s-12" in capsys.readouterr().err


def test_the_verb_key_leaves_an_open_api_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first entry in the file of keys closes the API to callers without a key."""
    assert main(["key", "remove", "s-12345678", "--home", str(tmp_path)]) == exit_codes.USAGE
    assert "a mesh without a secret has no sessions" in capsys.readouterr().err
    assert not (tmp_path / FILE_NAME).exists()


async def test_no_session_has_the_id_of_a_key_and_none_revokes_a_key(model_dir: Path, tmp_path: Path) -> None:
    access = policy(tmp_path, local_token=TOKEN)
    assert access.keys is not None
    text, key = access.keys.add(Role.ADMIN, datetime.datetime.now(datetime.UTC))
    async with served(ScriptedMesh(model_dir), ApiOptions(access=access)) as api:
        status, made = await asked(api, "POST", "/v1/session", TOKEN, {"id": f"s-{key.id}"})
        assert status == 200 and made["id"] != f"s-{key.id}"
        status, refused = await asked(api, "DELETE", f"/v1/keys/s-{key.id}", TOKEN)
        assert status == 400 and "is the id of a key" in refused["error"]["message"]
        assert (await asked(api, "GET", "/state", text))[0] == 200
