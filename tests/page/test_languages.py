"""Languages of the page: those that come with it, and those of a directory."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.api.web.assets import FOLDER
from exo_mesh.api.web.languages import MAX_FILE_BYTES, PageLanguages, built_in
from tests.api.scripted_mesh import ScriptedMesh, served


def write(folder: Path, tag: str, texts: object) -> None:
    (folder / f"{tag}.json").write_text(json.dumps(texts))


def test_english_is_always_offered_and_a_setting_chooses_the_others(tmp_path: Path) -> None:
    write(tmp_path, "fr", {})
    write(tmp_path, "pt-BR", {})
    assert PageLanguages().tags() == ["en", "de"]
    assert PageLanguages((), tmp_path).tags() == ["en", "de", "fr", "pt-BR"]
    assert PageLanguages(("pt-BR", "xx"), tmp_path).tags() == ["en", "pt-BR"]
    assert PageLanguages(("de",)).texts("fr") is None
    assert PageLanguages((), tmp_path / "none").tags() == ["en", "de"]


def test_only_known_texts_with_known_marks_are_served_and_the_rest_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    write(tmp_path, "fr", {"nav.chat": "Causerie", "key.why": "{secret}", "nav.mesh": 5, "password": "x"})
    languages = PageLanguages((), tmp_path)
    assert languages.texts("fr") == languages.texts("fr") == {"nav.chat": "Causerie"}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "unknown to this version: 1 key (password)" in said and "does not have: 2 keys (key.why, nav.mesh)" in said
    assert f"not translated: {len(built_in()['en']) - 3} keys (" in said


@pytest.mark.parametrize(
    "content", ["", "[1]", "{", "[" * 100_000, '"x"', '{"nav.chat": "' + "x" * MAX_FILE_BYTES + '"}']
)
def test_a_file_that_is_no_language_leaves_the_built_in_one(tmp_path: Path, content: str) -> None:
    for tag in ("de", "fr"):
        (tmp_path / f"{tag}.json").write_text(content)
    languages = PageLanguages((), tmp_path)
    assert languages.texts("de") == built_in()["de"]
    assert languages.texts("fr") is None


def test_nothing_outside_the_folder_is_read(tmp_path: Path) -> None:
    inner = tmp_path / "languages"
    inner.mkdir()
    write(tmp_path, "fr", {"nav.chat": "outside"})
    (inner / "es.json").mkdir()
    languages = PageLanguages((), inner)
    for tag in ("../fr", "fr", "/etc/passwd", "es", "..", "", "FR", "a" * 999):
        assert languages.texts(tag) is None


async def test_the_routes_are_open_also_on_a_closed_mesh(scripted: ScriptedMesh, tmp_path: Path) -> None:
    write(tmp_path, "fr", {"nav.chat": "Causerie"})
    options = ApiOptions(access=AccessPolicy(needs_key=True), languages=PageLanguages((), tmp_path))
    async with served(scripted, options) as api:
        async with api.http.get("/page/languages") as reply:
            assert [one["id"] for one in (await reply.json())["data"]] == ["en", "de", "fr"]
        async with api.http.get("/page/languages/fr") as reply:
            assert await reply.json() == {"nav.chat": "Causerie"}
        for tag in ("xx", "..%2f..%2fassets", "en%00"):
            async with api.http.get(f"/page/languages/{tag}") as reply:
                assert reply.status == 404
    async with served(scripted, ApiOptions(headless=True)) as api:
        for path in ("/page/languages", "/page/languages/en"):
            async with api.http.get(path) as reply:
                assert reply.status == 404


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's code in Node")
def test_one_is_singular_on_the_page() -> None:
    texts = {key: text for key, text in built_in()["en"].items() if "{n|" in text}
    module = (FOLDER / "app" / "strings.js").as_uri()
    script = f"""
        const {{ t }} = await import({json.dumps(module)});
        const texts = Object.entries({json.dumps(texts)});
        const shown = (n) => Object.fromEntries(texts.map(([key, text]) => [key, t(text, {{ n, hours: 3 }})]));
        console.log(JSON.stringify([shown(1), shown("1,024")]));
    """
    done = subprocess.run(["node", "--input-type=module", "-e", script], check=True, capture_output=True, timeout=60)
    one, many = json.loads(done.stdout)
    assert (one["models.layers"], many["models.layers"]) == ("1 layer", "1,024 layers")
    assert (one["mesh.days"], many["chat.tokens"]) == ("1 day 3 h", "1,024 tokens")
    for language in built_in().values():
        assert {key for key, text in language.items() if "{n|" in text} == texts.keys()
