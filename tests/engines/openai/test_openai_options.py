"""The options of the engine for OpenAI-style servers: what is accepted, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exo_mesh_openai.names import mesh_names, safe_name
from exo_mesh_openai.options import read_options

from exo_mesh.errors import InputError
from exo_mesh.weights.names import is_model_name


@pytest.mark.parametrize(
    ("given", "base", "where"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080", "127.0.0.1:8080"),
        ("http://127.0.0.1:8080/v1/", "http://127.0.0.1:8080", "127.0.0.1:8080"),
        ("https://gpu.example/llm/v1", "https://gpu.example:443/llm", "gpu.example:443"),
        ("http://box", "http://box:80", "box:80"),
        ("http://[::1]:11434/", "http://[::1]:11434", "[::1]:11434"),
        ("https://gw.example/v1/acc/gw/openai", "https://gw.example:443/v1/acc/gw/openai", "gw.example:443"),
        ("https://gw.example/v1/acc/gw/v1/chat/completions", "https://gw.example:443/v1/acc/gw", "gw.example:443"),
    ],
)
def test_a_server_is_named_by_its_base_url(given: str, base: str, where: str) -> None:
    (server,) = read_options({"servers": given}).servers
    assert (server.base, server.where) == (base, where)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a",
        "127.0.0.1:8080",
        "http://",
        "http://a:99999",
        "http://a/?key=1",
        "http://a/#x",
        "http://[::1",
        "http://a b",
    ],
)
def test_what_is_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="servers"):
        read_options({"servers": url})


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(InputError, match="key_file") as caught:
        read_options({"servers": "http://me:secret@127.0.0.1:8080"})
    assert "secret" not in str(caught.value)


def test_a_server_that_is_named_twice_is_refused() -> None:
    with pytest.raises(InputError, match=r"127\.0\.0\.1:1 is named twice"):
        read_options({"servers": "http://127.0.0.1:1, http://127.0.0.1:1/other"})


@pytest.mark.parametrize(
    "options",
    [
        {"no_such_option": "1"},
        {"names": "[]"},
        {"names": "{"},
        {"names": '{"a": 1}'},
        {"stands_for": '{"a": "../b"}'},
        {"slots": "0"},
        {"slots": "²"},
        {"slots": "9" * 30},
        {"first_token_s": "nan"},
        {"first_token_s": "-1"},
        {"model": "m.gguf"},
        {"binary": "/bin/true"},
        {"binary": "/bin/true", "models_dir": " , "},
        {"binary": "/bin/true", "model": "m.gguf", "backends": "abacus"},
        {"binary": "/bin/true", "model": "m.gguf", "context": "many"},
        {"binary": "/bin/true", "model": "m.gguf", "spec_type": "magic"},
        {"binary": "/bin/true", "model": "m.gguf", "spec_type": "draft_simple"},
        {"binary": "/bin/true", "model": "m.gguf", "spec_type": "draft_eagle3"},
        {"binary": "/bin/true", "model": "m.gguf", "draft_model": "d.gguf"},
        {"binary": "/bin/true", "model": "m.gguf", "no_spec": "perhaps"},
    ],
    ids=json.dumps,
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, str]) -> None:
    with pytest.raises(InputError) as caught:
        read_options(options)
    assert any(name in str(caught.value) for name in [*options, "model", "spec_type", "draft_model"])


def key_file(path: Path, content: str, mode: int) -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


def test_the_key_comes_from_a_file_and_stays_out_of_every_text(tmp_path: Path) -> None:
    options = read_options({"key_file": str(key_file(tmp_path / "key", "abc-123\n", 0o600))})
    assert options.key == "abc-123"
    assert "abc-123" not in repr(options)


@pytest.mark.parametrize(
    ("content", "mode"),
    [("abc", 0o644), ("abc", 0o640), ("", 0o600), ("a b", 0o600), ("ä", 0o600), ("k" * 5000, 0o600)],
)
def test_a_key_file_that_others_can_read_or_that_holds_no_key_is_refused(
    tmp_path: Path, content: str, mode: int
) -> None:
    with pytest.raises(InputError, match="key_file"):
        read_options({"key_file": str(key_file(tmp_path / "key", content, mode))})


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_options({"key_file": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("served", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("llama3.2:3b", "llama3.2-3b"),
        ("hf.co/org/name:Q4_K_M", "hf.co-org-name-Q4_K_M"),
        ("/models/Qwen3-0.6B-Q8_0.gguf", "Qwen3-0.6B-Q8_0"),
        ("C:\\models\\tiny.gguf", "tiny"),
        ("../../etc/passwd", "etc/passwd"),
        ("   ", "model"),
        ("日本", "model"),
        ("x" * 400, "x" * 200),
    ],
)
def test_a_served_name_becomes_a_name_that_the_mesh_allows(served: str, name: str) -> None:
    assert safe_name(served) == name
    assert is_model_name(safe_name(served))


def test_names_are_given_by_the_operator_and_never_equal() -> None:
    names = mesh_names(["a:b", "a b", "m"], {"m": "org/mine"})
    assert names == {"a:b": "a-b", "a b": "a-b-2", "m": "org/mine"}


def test_a_program_is_found_by_its_name_alone() -> None:
    own = read_options({"binary": "sh", "model": "m.gguf"}).own
    assert own is not None and own.binary.is_absolute() and own.binary.name == "sh"
