"""A command finds the nodes of its user, and shows the local token to no other program."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.client.api_client import ApiClient, NoNodeError
from exo_mesh.cli.client.mesh_nodes import MeshNodes
from exo_mesh.cli.client.trust import default_url
from exo_mesh.cli.main import main
from exo_mesh.errors import MeshError
from exo_mesh.security import own_nodes
from exo_mesh.security.api_keys import KeyFile
from exo_mesh.security.local_token import take_token
from exo_mesh.security.own_nodes import (
    ListeningMark,
    began,
    live_nodes,
    node_at,
    registered_homes,
    token_for,
)
from exo_mesh.settings.default_paths import own_nodes_dir
from tests.cli.closed_port import closed_port
from tests.cli.test_main import ASKING
from tests.security.test_api_tls import write_pair


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user of the machine: with a default home in which no node runs, and no other node. Returns their folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("EXO_MESH_HOME", str(tmp_path / "usual"))
    for name in ("EXO_MESH_API_KEY", "EXO_MESH_API_URL"):
        monkeypatch.delenv(name, raising=False)
    return own_nodes_dir()


class Refusing(BaseHTTPRequestHandler):
    """Answers as a closed node does to a caller without rights, and keeps what callers showed."""

    def do_GET(self) -> None:
        self.server.shown.append(self.headers.get("Authorization"))  # type: ignore[attr-defined]
        body = json.dumps({"error": {"message": "this API needs a valid key", "code": "invalid_api_key"}}).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def listening(host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[int, list[str | None]]]:
    """(the port of a program that answers there, what callers showed it)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server_class = type("Server", (ThreadingHTTPServer,), {"address_family": family})
    server = server_class((host, port), Refusing)
    server.shown = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1], server.shown
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def node(home: Path, registry: Path | None, host: str = "127.0.0.1") -> Iterator[tuple[int, list[str | None], str]]:
    """(port, what callers showed, token) of a node of that home, as far as the command line is concerned."""
    token = take_token(home)
    with listening(host) as (port, shown):
        mark = ListeningMark(home, host, port, registry=registry)
        try:
            yield port, shown, token
        finally:
            mark.close()


def ask(url: str, home: Path | None = None) -> str:
    """The message of the refusal."""
    with pytest.raises(MeshError) as caught:
        ApiClient(url, home).get("/state")
    return str(caught.value)


def test_a_node_with_a_home_of_its_own_gives_its_user_local_rights_without_naming_the_home(
    tmp_path: Path, user: Path
) -> None:
    with node(tmp_path / "own", user) as (port, shown, token):
        ask(f"http://127.0.0.1:{port}")
        ask(f"http://localhost:{port}")
        assert shown == [f"Bearer {token}"] * 2
        assert default_url() == f"http://127.0.0.1:{port}", "it is the only node of this user"
        assert default_url(tmp_path / "own") == f"http://127.0.0.1:{port}", "a home needs no address either"
    assert default_url() == "http://127.0.0.1:52415"


@pytest.mark.parametrize("verb", [*ASKING, "doctor"])
def test_no_verb_needs_the_home_of_a_node_of_this_user(
    tmp_path: Path, user: Path, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exo_mesh.cli.verbs.doctor.checks_for", lambda *_: {})
    with node(tmp_path / "own", user) as (port, shown, token):
        main([verb, *ASKING.get(verb, []), "--api-url", f"http://127.0.0.1:{port}"])
    assert shown and set(shown) == {f"Bearer {token}"}, capsys.readouterr().err


def test_the_node_of_the_usual_home_is_meant_before_others(tmp_path: Path, user: Path) -> None:
    with node(tmp_path / "own", user), node(tmp_path / "usual", user) as (port, _, _):
        assert default_url() == f"http://127.0.0.1:{port}"


def test_a_node_of_another_user_gets_no_token_and_the_message_names_the_remedy(tmp_path: Path, user: Path) -> None:
    with node(tmp_path / "own", user), node(tmp_path / "theirs", None) as (port, shown, _):
        message = ask(f"http://127.0.0.1:{port}")
        assert "is not your node" in message and "as the user who started that node" in message
        assert "leave out --home" in ask(f"http://127.0.0.1:{port}", tmp_path / "own")
        assert shown == [None, None]


def test_a_program_that_took_the_port_of_a_node_that_was_killed_gets_no_token(tmp_path: Path, user: Path) -> None:
    with node(tmp_path / "own", user) as (port, _, _):
        entry = next(user.iterdir()).read_text()
        mark = (tmp_path / "own" / "listening" / str(port)).read_text()
    with listening() as (port, shown):
        fields = json.loads(mark) | {"port": port}
        (tmp_path / "own" / "listening" / str(port)).write_text(json.dumps(fields))
        (user / "1-1.json").write_text(entry)
        (user / "1-1.json").chmod(0o600)
        ask(f"http://127.0.0.1:{port}")
        assert shown == [None]
    assert registered_homes(user) == [] and not list(user.iterdir()), "the entry is removed"


def test_a_session_goes_to_no_program_that_took_the_port_either(tmp_path: Path, user: Path) -> None:
    with node(tmp_path / "own", user) as (port, _, token):
        client = ApiClient(f"http://127.0.0.1:{port}")
        client._session.text = "exo-session-x"
        assert client.credentials() == {"Authorization": "Bearer exo-session-x"}
    assert client.credentials() == {} and token
    for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]", "127.1"):
        assert client.at(f"http://{host}:1", with_key=True).credentials() == {}, "any user may listen there"


def test_a_session_goes_to_members_on_other_machines_and_to_those_of_this_user(tmp_path: Path, user: Path) -> None:
    session = {"Authorization": "Bearer exo-session-x"}
    with node(tmp_path / "own", user) as (port, _, _), node(tmp_path / "second", user) as (second, _, _):
        client = ApiClient(f"http://127.0.0.1:{port}", tmp_path / "own")
        client._session.text = "exo-session-x"
        assert client.at(f"http://127.0.0.1:{second}", with_key=True).credentials() == session
        assert client.at("http://192.0.2.1:1", with_key=True).credentials() == session
        assert client.at("http://192.0.2.1:1", with_key=False).credentials() == {}


def test_the_token_takes_the_place_of_a_session_that_its_node_refuses(tmp_path: Path, user: Path) -> None:
    with node(tmp_path / "own", user) as (port, shown, token), node(tmp_path / "second", user) as (second, other, _):
        client = ApiClient(f"http://127.0.0.1:{port}", tmp_path / "own")
        client._session.text, client._session.renew_at = "exo-session-x", float("inf")
        with pytest.raises(MeshError):
            client.at(f"http://127.0.0.1:{second}", with_key=True).get("/state")
        assert other == ["Bearer exo-session-x"], "only this member refuses it"
        with pytest.raises(MeshError):
            client.get("/state")
        assert shown == ["Bearer exo-session-x", f"Bearer {token}"]
        client.open_session()
        assert len(shown) == 3, "a new one is asked for"


def test_a_node_alone_is_asked_for_no_session(tmp_path: Path, user: Path) -> None:
    with node(tmp_path / "own", user) as (port, shown, token):
        nodes = MeshNodes(ApiClient(f"http://127.0.0.1:{port}"))
        alone = {"name": "a", "api_url": f"http://192.0.2.1:{port}"}
        nodes.note([alone, {"name": "b", "api_url": ""}], {"mesh": "closed"})
        assert shown == []
        nodes.note([alone, {"name": "b", "api_url": "http://192.0.2.2:1"}], {"mesh": "closed"})
        assert shown == [f"Bearer {token}"]


def test_a_program_at_the_other_address_of_localhost_gets_no_token(tmp_path: Path, user: Path) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with node(tmp_path / "own", user) as (port, shown, token), listening("::1", port) as (_, stolen):
        ask(f"http://localhost:{port}")
        assert (shown, stolen) == ([f"Bearer {token}"], [])
        ask(f"http://[::1]:{port}")
        assert stolen == [None]


def test_a_mark_of_another_machine_that_shares_the_home_counts_not(tmp_path: Path) -> None:
    take_token(tmp_path)
    mark = ListeningMark(tmp_path, "127.0.0.1", 7000)
    path = tmp_path / "listening" / "7000"
    good = json.loads(path.read_text())
    assert token_for([tmp_path], "127.0.0.1", 7000)
    for change in ({"began": "1"}, {"began": ""}, {"pid": 2**22 + 1}, {"pid": 0}, {"pid": "x"}):
        path.write_text(json.dumps(good | change))
        assert token_for([tmp_path], "127.0.0.1", 7000) == ""
    mark.close()


def test_a_node_of_an_older_version_is_found_at_the_address_where_its_port_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mark has only the host as its settings write it."""
    addresses = [(None, None, 0, "", (address, 0)) for address in ("192.0.2.1", "127.0.0.1")]
    known, asked = {"alpha.lan": addresses}, socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: known.get(host) or asked(host, *a, **k))
    with node(tmp_path, None) as (port, _, token):
        for name in ("127.0.0.1", "localhost", "alpha.lan"):
            (tmp_path / "listening" / str(port)).write_text(name)
            assert token_for([tmp_path], "127.0.0.1", port) == token
            assert token_for([tmp_path], name, port) == token
            assert token_for([tmp_path], "192.0.2.1", port) == "", "another machine has that address"


def test_a_home_that_another_user_created_again_where_an_entry_points_counts_not(tmp_path: Path, user: Path) -> None:
    home = tmp_path / "own"
    for change in (lambda: (home / "listening").chmod(0o755), lambda: os.chown(home / "listening", 65534, 65534)):
        with node(home, user) as (port, shown, _):
            assert registered_homes(user) == [home]
            if os.geteuid() == 0 or change.__code__.co_names[0] == "home":
                change()
            ask(f"http://127.0.0.1:{port}")
            assert shown == [None] and registered_homes(user) == []
        shutil.rmtree(home)


def test_a_mark_that_is_no_file_of_its_home_counts_not_and_stops_nobody(tmp_path: Path, user: Path) -> None:
    with node(tmp_path / "own", user) as (port, _, _):
        mark = tmp_path / "own" / "listening" / str(port)
        (folder := tmp_path / "second" / "listening").mkdir(mode=0o700, parents=True)
        for put in (os.mkfifo, lambda path: path.symlink_to(mark), lambda path: path.mkdir()):
            put(folder / str(port))
            assert live_nodes(tmp_path / "second") == []
            assert node_at([tmp_path / "second"], "127.0.0.1", port) is None
            shutil.rmtree(folder / str(port)) if (folder / str(port)).is_dir() else (folder / str(port)).unlink()
        if os.geteuid() == 0:
            os.chown(mark, 65534, 65534)
            assert node_at([tmp_path / "own"], "127.0.0.1", port) is None


def test_a_link_in_place_of_the_folder_of_nodes_changes_no_folder(tmp_path: Path, user: Path) -> None:
    (target := tmp_path / "target").mkdir()
    target.chmod(0o755)
    user.parent.mkdir(parents=True)
    user.symlink_to(target)
    with node(tmp_path / "own", user):
        assert not list(target.iterdir()) and stat.S_IMODE(target.stat().st_mode) == 0o755


def test_a_home_may_be_named_by_the_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with node(tmp_path / "own", None) as (port, _, token):
        client = ApiClient(f"http://127.0.0.1:{port}", "~/own")
        assert client.credentials() == {"Authorization": f"Bearer {token}"}
        assert default_url("~/own") == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("verb", [["run", "m", "Hello"], ["doctor"]])
def test_the_certificate_of_the_usual_home_is_not_taken_for_that_of_another_node(
    tmp_path: Path, user: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    (usual, key), (other, _) = write_pair(tmp_path / "tls"), write_pair(tmp_path / "other")
    monkeypatch.setenv("EXO_MESH_TLS_CERT", str(usual))
    monkeypatch.setenv("EXO_MESH_TLS_KEY", str(key))
    made: list[Path | None] = []

    class Noted(ApiClient):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self.certificate)
            raise NoNodeError("noted")

    for module in ("run", "doctor"):
        monkeypatch.setattr(f"exo_mesh.cli.verbs.{module}.ApiClient", Noted)
    mark = ListeningMark(tmp_path / "own", "127.0.0.1", 7000, certificate=other, registry=user)
    main([*verb, "--api-url", "https://127.0.0.1:7000"])
    main([*verb, "--api-url", "https://127.0.0.1:7000", "--tls-cert", str(usual)])
    assert made == [other, usual]
    mark.close()


def test_the_start_of_a_process_is_known_and_of_no_process_is_not() -> None:
    assert began(os.getpid()) == began(os.getpid()) != ""
    assert began(2**22 + 1) == ""


def test_entries_are_for_their_user_only(tmp_path: Path, user: Path) -> None:
    with node(tmp_path / "own", user) as (port, _, _):
        entry = next(user.iterdir())
        assert [stat.S_IMODE(path.stat().st_mode) for path in (user, entry)] == [0o700, 0o600]
        fields = json.loads(entry.read_text())
        assert (fields["home"], fields["port"], fields["pid"]) == (str(tmp_path / "own"), port, os.getpid())
        assert registered_homes(user) == [tmp_path / "own"]
        entry.chmod(0o666)
        assert registered_homes(user) == [], "others could have written it"
    with node(tmp_path / "own", user):
        user.chmod(0o777)
        assert registered_homes(user) == []
        user.chmod(0o700)
    assert not list(user.iterdir())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"home": 5, "port": 1}', '{"home": "rel", "port": 1}', "\udcff"])
def test_a_damaged_entry_is_removed(user: Path, text: str) -> None:
    user.mkdir(parents=True, mode=0o700)
    (user / "1-1.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    (user / "1-1.json").chmod(0o600)
    assert registered_homes(user) == [] and not list(user.iterdir())


def test_a_flood_of_entries_costs_a_bounded_number_of_looks(
    tmp_path: Path, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_nodes, "MAX_ENTRIES", 40)
    user.mkdir(parents=True, mode=0o700)
    for index in range(80):
        (user / f"{index}-1.json").touch(0o600)
    registered_homes(user)
    assert len(list(user.iterdir())) == 40
    with node(tmp_path / "own", user):
        assert len(list(user.iterdir())) == 1, "a node that starts removes what is stale"


def test_a_node_that_cannot_leave_an_entry_runs_and_its_home_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with node(tmp_path / "own", tmp_path / "file" / "nodes") as (port, _, token):
        assert token_for([tmp_path / "own"], "127.0.0.1", port) == token


def test_a_node_is_found_under_each_address_that_reaches_only_it(tmp_path: Path) -> None:
    cases = {
        "127.0.0.1": ({"127.0.0.1", "localhost"}, {"::1", "127.0.0.2", "192.0.2.1", "beta"}),
        "0.0.0.0": ({"127.0.0.1", "127.0.0.9", "localhost"}, {"::1", "192.0.2.1", "beta"}),
        "::": ({"127.0.0.1", "::1", "localhost"}, {"192.0.2.1", "2001:db8::1"}),
        "::1": ({"::1", "localhost"}, {"127.0.0.1"}),
        "192.0.2.1": ({"192.0.2.1"}, {"127.0.0.1", "localhost", "::1", "192.0.2.2"}),
    }
    for bound, (good, bad) in cases.items():
        mark = ListeningMark(tmp_path, bound, 7000)
        assert {host for host in good | bad if node_at([tmp_path], host, 7000)} == good, bound
        mark.close()
    mark = ListeningMark(tmp_path, "192.0.2.1", 7000, name="alpha.lan")
    assert live_nodes(tmp_path)[0].address_for("alpha.lan") == "192.0.2.1", "not what a name server says"
    mark.close()


def test_without_any_node_the_usual_address_is_asked() -> None:
    with pytest.raises(NoNodeError, match="no node answers"):
        ApiClient(f"http://127.0.0.1:{closed_port()}").get("/state")


def test_keys_are_those_of_the_node_that_other_commands_call(
    tmp_path: Path, user: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("EXO_MESH_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with node(tmp_path / "first", user), node(tmp_path / "second", user) as (port, _, token):
        assert main(["key", "new"]) == exit_codes.OK
        assert len(KeyFile(tmp_path / "first" / "api_keys.toml").read()) == 1, "it has run for longest"
        there = ["--api-url", f"http://127.0.0.1:{port}"]
        assert main(["key", "new", *there]) == exit_codes.OK
        assert len(KeyFile(tmp_path / "second" / "api_keys.toml").read()) == 1
        capsys.readouterr()
        assert main(["key", "local", *there]) == exit_codes.OK
        assert capsys.readouterr().out.strip() == token
        named = tmp_path / "named"
        monkeypatch.setenv("EXO_MESH_HOME", str(named))
        assert main(["key", "new"]) == exit_codes.OK
        assert len(KeyFile(named / "api_keys.toml").read()) == 1, "a home that is named counts"
        monkeypatch.delenv("EXO_MESH_HOME")
    assert main(["key", "new", *there]) == exit_codes.USAGE
    assert f"no node of this user serves http://127.0.0.1:{port}" in capsys.readouterr().err
    assert main(["key", "new"]) == exit_codes.OK
    assert len(list((tmp_path / "data").rglob("api_keys.toml"))) == 1, "no node runs: the default home"
