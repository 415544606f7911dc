"""Which secrets are taken, where they come from, and that nobody is told."""

from __future__ import annotations

import secrets
import stat
from pathlib import Path

import pytest

from exo_mesh.cli import exit_codes
from exo_mesh.cli.main import main
from exo_mesh.security.secret import estimated_bits, exposure, new_secret, parse_secret, read_secret_file
from exo_mesh.settings.config import SECRET_FILE_NAME, ConfigError
from exo_mesh.settings.loading import load_settings

GOOD = "RqbG1iSVDWVZ0yNAZt6zWv8Yv3k6bZr0M0u2tW1cGxE"
OTHER = "0f5c8bb0a1f3fd0c0a6b8a1d3f0e4a77"


@pytest.fixture(autouse=True)
def home(no_settings_from_outside: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXO_MESH_HOME", str(tmp_path))


FRESH = [pytest.param(secrets.token_hex(16), id="hex"), pytest.param(secrets.token_urlsafe(16), id="base64")]


@pytest.mark.parametrize("text", [GOOD, OTHER, f"  {GOOD}\n", *FRESH])
def test_secrets_of_128_bits_are_taken(text: str) -> None:
    assert parse_secret(text) == text.strip()


def test_new_secrets_are_good_and_never_the_same() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100
    assert all(estimated_bits(parse_secret(secret)) >= 256 for secret in made)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("hunter2", "too short"),
        pytest.param(secrets.token_hex(15), "too short", id="fifteen bytes"),
        ("12345678901234567890123456789012345678"[:38], "too short"),
        ("a" * 100, "too short"),
        ("abababababababababababababababababab", "too short"),
        (GOOD + "\x00", "printable"),
        ("пароль" * 10, "printable"),
        (f"{GOOD}\n{GOOD}", "printable"),
    ],
)
def test_others_are_refused_without_being_quoted(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        parse_secret(text)
    assert len(text.strip()) < 3 or text.strip() not in str(refused.value)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 5000)
    (tmp_path / "binary").write_bytes(b"\xff" * 64)
    for name, complaint in [
        ("none", "No such file"),
        ("", "directory"),
        ("large", "than 4096"),
        ("binary", "printable"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            read_secret_file(tmp_path / name)


def settings_of(tmp_path: Path, flag: str = "", environ: dict[str, str] | None = None, toml: str = "") -> str:
    (tmp_path / "config.toml").write_text(toml)
    flags = {"home": [str(tmp_path)], **({"secret_file": [flag]} if flag else {})}
    return load_settings(flags, environ or {}).settings.secret


def test_the_nearest_source_of_a_secret_wins(tmp_path: Path) -> None:
    (a := tmp_path / "a").write_text(GOOD)
    (b := tmp_path / "b").write_text(OTHER)
    assert settings_of(tmp_path) == ""
    assert settings_of(tmp_path, str(a), {"EXO_MESH_SECRET": OTHER}) == GOOD
    assert settings_of(tmp_path, environ={"EXO_MESH_SECRET": OTHER}, toml=f"secret_file = '{a}'") == OTHER
    assert settings_of(tmp_path, environ={"EXO_MESH_SECRET_FILE": str(b)}, toml=f"secret_file = '{a}'") == OTHER
    assert settings_of(tmp_path, toml=f"secret_file = '{a}'") == GOOD
    with pytest.raises(ConfigError, match="both set"):
        settings_of(tmp_path, environ={"EXO_MESH_SECRET_FILE": str(b), "EXO_MESH_SECRET": GOOD})


@pytest.mark.parametrize(
    ("content", "complaint"), [(None, "cannot be read"), ("", "empty"), ("hunter2", "too short"), ("x" * 99, "short")]
)
def test_a_bad_secret_stops_a_node_with_one_line(
    content: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    assert main(["serve", "--home", str(tmp_path), "--secret-file", str(file)]) == exit_codes.USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"exo-mesh: --secret-file {file}: ") and said.count("\n") == 1
    assert complaint in said and (not content or content not in said)


def test_config_show_names_the_file_and_never_the_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text(GOOD)
    for more in ([], ["--origin"], ["--json"]):
        assert main(["config", "show", "--secret-file", str(tmp_path / "secret"), *more]) == 0
        shown = capsys.readouterr().out
        assert str(tmp_path / "secret") in shown and GOOD not in shown
    monkeypatch.setenv("EXO_MESH_SECRET", GOOD)
    assert main(["config", "show", "--origin", "--json"]) == 0
    assert GOOD not in capsys.readouterr().out
    assert GOOD not in repr(load_settings({}, {"EXO_MESH_SECRET": GOOD}))


def test_there_is_no_flag_and_no_key_for_the_secret_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--secret", GOOD]) == exit_codes.USAGE
    (tmp_path / "config.toml").write_text(f"secret = '{GOOD}'\n")
    assert main(["config", "show", "--home", str(tmp_path)]) == exit_codes.USAGE
    assert GOOD not in capsys.readouterr().err


def test_secret_new_prints_one_or_writes_it_for_its_owner_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["secret", "new"]) == 0
    assert parse_secret(capsys.readouterr().out)
    out = tmp_path / "mesh.secret"
    assert main(["secret", "new", "--out", str(out)]) == 0
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    secret = read_secret_file(out)
    said = capsys.readouterr()
    assert secret not in said.out + said.err
    assert main(["secret", "new", "--out", str(out)]) == exit_codes.USAGE
    assert "never overwritten" in capsys.readouterr().err
    assert read_secret_file(out) == secret


@pytest.mark.parametrize(("mode", "who"), [(0o600, ""), (0o400, ""), (0o640, "its group"), (0o644, "everybody")])
def test_a_file_that_others_may_read_is_told(mode: int, who: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(GOOD)
    file.chmod(mode)
    assert (who in exposure(file)) if who else exposure(file) == ""


def test_the_secret_that_join_left_in_the_home_is_used_if_no_other_is_named(tmp_path: Path) -> None:
    (a := tmp_path / "a").write_text(GOOD)
    (tmp_path / SECRET_FILE_NAME).write_text(OTHER)
    assert settings_of(tmp_path) == OTHER
    assert settings_of(tmp_path, str(a)) == settings_of(tmp_path, toml=f"secret_file = '{a}'") == GOOD
    assert settings_of(tmp_path, environ={"EXO_MESH_SECRET": GOOD}) == GOOD
    (tmp_path / SECRET_FILE_NAME).write_text("short")
    with pytest.raises(ConfigError, match=f"{SECRET_FILE_NAME}: the secret is too short"):
        settings_of(tmp_path)
