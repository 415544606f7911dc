"""Terminals that are not UTF-8, and files and pipes that begin with a byte-order mark."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.api.webtools.options import WebToolOptions
from exo_mesh.base.printable import cells, typed
from exo_mesh.base.telemetry.tables import columns
from exo_mesh.cli.bench.scenario import read_scenario
from exo_mesh.cli.client.api_client import ApiClient
from exo_mesh.cli.client.batch_file import check_requests
from exo_mesh.cli.main import main
from exo_mesh.cli.terminal import piped_text, prepare_streams
from exo_mesh.errors import InputError
from exo_mesh.mesh.discovery.peers_file import read_peers
from exo_mesh.mesh.discovery.static_group import read_hostfile
from exo_mesh.mesh.discovery.tailscale import read_key
from exo_mesh.models.cards.card_store import _text_of
from exo_mesh.security.api_keys import KeyFile
from exo_mesh.security.api_tls import read_pem
from exo_mesh.security.secret import read_secret_file
from exo_mesh.settings.config import default_settings
from exo_mesh.settings.loading import load_settings
from tests.cli.test_status import URL, a_state

MARK = b"\xef\xbb\xbf"
NAME = "名前 é\udce9"
SECRET = "0f5c8bb0a1f3fd0c0a6b8a1d3f0e4a77"


class Terminal:
    """Standard input and output of an encoding."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, encoding: str, given: bytes = b"") -> None:
        self._raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(self._raw, encoding=encoding))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding=encoding))

    def shown(self) -> str:
        sys.stdout.flush()
        return self._raw.getvalue().decode(sys.stdout.encoding)


def state_with_names() -> dict[str, Any]:
    state = a_state()
    for peer in [*state["view"]["peers"], *state["health"]["peer_health"]]:
        peer["name"] = NAME
    return state


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
@pytest.mark.parametrize("verb", [["status"], ["topology"], ["ps"], ["status", "--json"]])
def test_a_verb_prints_names_that_the_terminal_cannot_show(
    monkeypatch: pytest.MonkeyPatch, encoding: str, verb: list[str]
) -> None:
    terminal = Terminal(monkeypatch, encoding)
    monkeypatch.setattr(ApiClient, "get", lambda *_: {**state_with_names(), "refused": [NAME]})
    assert main([*verb, "--api-url", URL]) == 0
    text = terminal.shown()
    if "--json" in verb:
        assert {peer["name"] for peer in json.loads(text)["view"]["peers"]} == {NAME}, "JSON loses nothing"
    else:
        assert ("名前" if encoding == "utf-8" else "??") in text


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_tables_stay_aligned_where_names_are_wide_or_cannot_be_shown(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    shown = {}
    for verb in ("topology", "status"):
        terminal = Terminal(monkeypatch, encoding)
        monkeypatch.setattr(ApiClient, "get", lambda *_: {**state_with_names(), "refused": []})
        assert main([verb, "--api-url", URL]) == 0
        shown[verb] = [line for line in terminal.shown().splitlines() if line.strip()]
    table = [line for line in shown["topology"] if "peer" in line or "here" in line]
    assert len(table) >= 2 and len({cells(line) for line in table}) == 1, table
    header, row = (next(line for line in shown["status"] if word in line) for word in ("HEALTH", "here"))
    assert header.index("HEALTH") == cells(row[: row.index("degraded")]), (header, row)


def test_a_character_that_is_not_there_takes_as_many_columns_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch, "ascii")
    prepare_streams()
    print("█▒· → 名前|é|e\u0301|\U0001f600|\udce9|…")
    assert terminal.shown() == "#=. > ????|?|e|??|?|.\n"
    assert [cells(text) for text in ("", "ab", "名前", "é", "e\u0301", "\U0001f600")] == [0, 2, 4, 1, 1, 2]
    assert columns(("A", "B"), [("名", 1), ("abc", 2)]) == "A    B\n名   1\nabc  2"


def test_input_is_utf_8_whatever_the_locale_is(monkeypatch: pytest.MonkeyPatch) -> None:
    Terminal(monkeypatch, "ascii", MARK + "Zähle 名".encode())
    prepare_streams()
    assert piped_text() == "Zähle 名"
    Terminal(monkeypatch, "ascii", "é\n".encode())
    prepare_streams()
    assert input() == "é", "a conversation reads lines"
    Terminal(monkeypatch, "utf-8", b"caf\xe9")
    with pytest.raises(InputError, match="standard input is not UTF-8 text: byte 3 is invalid; convert it"):
        piped_text()


def test_a_name_in_another_encoding_is_read_as_utf_8(tmp_path: Path) -> None:
    as_ascii = "名前".encode().decode("ascii", "surrogateescape")
    assert typed(as_ascii) == "名前"
    assert typed("caf\udce9") == "caf\udce9", "which is not UTF-8"
    loaded = load_settings({"home": [str(tmp_path)], "name": [as_ascii]}, {})
    assert loaded.settings.name == "名前"
    with pytest.raises(InputError, match="is needed"):
        load_settings({"home": [str(tmp_path)], "name": ["caf\udce9"]}, {})


def test_a_text_that_cannot_be_sent_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "caf\udce9", "--api-url", URL]) == 1
    assert capsys.readouterr().err.startswith("exo-mesh: ")


CARD = b'model_id = "a/b"\n'
HOSTS = b'[{"ssh": "a", "ips": ["192.0.2.1"]}, {"ssh": "b", "ips": ["192.0.2.2"]}]'
BATCH = b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n'
READERS: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
    "config.toml": (b"api_port = 7\n", lambda file: load_settings({"home": [str(file.parent)]}, {}).settings.api_port),
    "secret": (SECRET.encode(), read_secret_file),
    "peers": (b"192.0.2.1:5000\n", lambda file: read_peers(file, 5000)),
    "peers.json": (b'{"peers": [{"address": "192.0.2.1"}]}', lambda file: read_peers(file, 5000)),
    "hosts.json": (HOSTS, read_hostfile),
    "tailscale": (b"tskey-api-1\n", read_key),
    "search": (
        b"brave-key\n",
        lambda file: WebToolOptions.of(replace(default_settings(), web_search="brave", web_search_key_file=file)),
    ),
    "api_keys": (b"", lambda file: KeyFile(file).read()),
    "batch.jsonl": (BATCH, check_requests),
    "card.toml": (CARD, _text_of),
    "scenario.toml": (b"rounds = 2\n", lambda file: read_scenario(str(file))),
    "scenario.json": (b'{"rounds": 2}', lambda file: read_scenario(str(file))),
}


@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_changes_nothing(name: str, tmp_path: Path) -> None:
    content, read = READERS[name]
    (tmp_path / "plain").mkdir()
    (tmp_path / "marked").mkdir()
    (plain := tmp_path / "plain" / name).write_bytes(content)
    (marked := tmp_path / "marked" / name).write_bytes(MARK + content)
    assert read(marked) == read(plain)


def test_a_mark_that_openssl_cannot_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_bytes(MARK + b"-----BEGIN PRIVATE KEY-----\n")
    with pytest.raises(ValueError, match="begins with a byte-order mark"):
        read_pem(tmp_path / "key.pem")
