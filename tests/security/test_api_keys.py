"""Keys of the HTTP API: shown once, kept as hashes, noticed while a node runs."""

from __future__ import annotations

import datetime
import json
import stat
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.main import main
from exo_mesh.errors import InputError
from exo_mesh.security.api_keys import FILE_NAME, KeyFile, Role, new_key

NOW = datetime.datetime(2030, 5, 1, tzinfo=datetime.UTC)


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / FILE_NAME)


def test_a_key_opens_and_nothing_like_it_does(file: KeyFile) -> None:
    text, key = new_key(Role.USE, NOW)
    other, _ = new_key(Role.USE, NOW)
    file.write([key])
    found = file.check(text)
    assert found == key and found.role is Role.USE
    wrong = [other, "", "x", text[:-1], text + "x", text.upper(), f"xm-{key.id}-", f"xm-{key.id}-{other[-43:]}"]
    wrong += [f"xm-00000000-{text[-43:]}", key.digest, f"xm-{key.id}-{key.digest[:43]}", "ключ", text + "\n"]
    for guess in wrong:
        assert file.check(guess) is None


def test_the_file_has_no_key_in_it_and_is_its_owners(file: KeyFile) -> None:
    text, key = new_key(Role.ADMIN, NOW)
    file.write([key])
    assert text[-43:] not in file.path.read_text()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert file.read() == [key]
    assert list(file.path.parent.iterdir()) == [file.path]


def test_the_same_key_would_be_stored_differently_twice() -> None:
    assert len({new_key(Role.USE, NOW)[1].salt for _ in range(10)}) == 10


def test_a_running_node_notices_new_removed_and_broken_keys(file: KeyFile) -> None:
    assert not file.configured
    (text, key), (text2, key2) = new_key(Role.USE, NOW), new_key(Role.USE, NOW)
    file.write([key])
    assert file.configured and file.check(text)
    file.write([key, key2])
    assert file.check(text) and file.check(text2)
    file.write([key2])
    assert not file.check(text) and file.check(text2)
    file.path.write_text("this is [not TOML")
    assert not file.check(text2) and file.configured
    file.path.unlink()
    assert file.configured, "removing the file must not open a running node"


@pytest.mark.parametrize(
    "content",
    [
        "[",
        "role = 1",
        "[a]\nrole = 'king'\nsalt = ''\nsha256 = ''",
        "[a]\nrole = 'use'",
        "[a]\nrole = 'use'\nsalt = ''\nsha256 = '00'",
        "ü",
    ],
)
def test_a_file_that_makes_no_sense_is_refused(file: KeyFile, content: str) -> None:
    file.path.write_text(content)
    with pytest.raises(InputError, match="not a valid file of API keys"):
        file.read()


def test_roles() -> None:
    assert Role.ADMIN.covers(Role.USE) and Role.ADMIN.covers(Role.ADMIN) and Role.USE.covers(Role.USE)
    assert not Role.USE.covers(Role.ADMIN)


def test_the_verb_makes_lists_and_removes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = ["--home", str(tmp_path)]
    assert main(["key", "new", "--role", "admin", *home]) == 0
    said = capsys.readouterr()
    text = said.out.strip()
    key = KeyFile(tmp_path / FILE_NAME).check(text)
    assert key is not None and key.role is Role.ADMIN and text not in said.err
    assert main(["key", "new", "Ana's laptop ☕", "--json", *home]) == 0
    assert json.loads(capsys.readouterr().out)["role"] == "use"
    assert main(["key", "list", *home]) == 0
    listed = capsys.readouterr().out
    assert key.id in listed and text not in listed and "Ana's laptop ☕" in listed and listed.count("\n") == 3
    assert main(["key", "remove", key.id, *home]) == 0
    assert KeyFile(tmp_path / FILE_NAME).check(text) is None
    assert main(["key", "remove", key.id, *home]) == exit_codes.USAGE
    assert main(["key", "remove", *home]) == exit_codes.USAGE
    assert main(["key", "new", "--role", "king", *home]) == exit_codes.USAGE
