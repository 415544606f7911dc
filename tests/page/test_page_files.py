"""The static files of the page: their headers, their size, and where they come from."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

from exo_mesh.api.access import AccessPolicy
from exo_mesh.api.context import ApiOptions
from exo_mesh.api.web.assets import FOLDER, PageAssets
from exo_mesh.api.web.members import member_urls
from exo_mesh.api.web.page_routes import content_security_policy
from exo_mesh.cli.stage_colours import STAGE_COLOURS
from tests.api.scripted_mesh import ScriptedMesh, Served, served

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
OWN = [path for path in FOLDER.rglob("*") if path.suffix in (".js", ".css", ".html") and "vendor" not in path.parts]
ENGLISH = json.loads((FOLDER / "strings" / "en.json").read_text())


async def test_browsers_get_the_page_and_programs_get_json(api: Served) -> None:
    async with api.http.get("/", headers=HTML) as reply:
        assert (reply.status, reply.content_type) == (200, "text/html")
        assert reply.headers["Vary"] == "Accept"
        assert reply.headers["Cache-Control"] == "no-cache"
        assert "/app/main.js" in await reply.text()
    async with api.http.get("/", headers={"Accept": "*/*"}) as reply:
        assert (reply.status, reply.content_type) == (200, "application/json")
        assert (await reply.json())["name"] == "exo-mesh"
    async with api.http.get("/dashboard") as reply:
        assert reply.content_type == "text/html"


async def test_the_page_allows_no_inline_script_and_no_foreign_source(api: Served) -> None:
    async with api.http.get("/", headers=HTML) as reply:
        rules = dict(rule.split(" ", 1) for rule in reply.headers["Content-Security-Policy"].split("; "))
        text = await reply.text()
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", text)
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["X-Frame-Options"] == "DENY"
    assert reply.headers["Referrer-Policy"] == "no-referrer"


def test_the_page_may_call_the_other_members() -> None:
    assert "connect-src 'self' http://10.0.0.2:52415;" in content_security_policy(["http://10.0.0.2:52415"])


@pytest.mark.parametrize(
    ("url", "name", "found"),
    [
        ("http://10.0.0.2:52415", "Studio", {"http://10.0.0.2:52415", "http://studio:52415", "http://studio.local:52415"}),
        ("https://[fd00::2]:52415", "a b", {"https://[fd00::2]:52415"}),
        ("http://evil.example:80", "evil.example", {"http://evil.example.local:80"}),
        ("http://x; script-src *:1", "x'y", set()),
        ("http://10.0.0.2:99999", "n", set()),
        ("javascript:alert(1)", "n", set()),
        ("", "n", set()),
    ],
)  # fmt: skip
def test_only_addresses_and_local_names_of_members_are_let_through(url: str, name: str, found: set[str]) -> None:
    assert set(member_urls(url, (), name)) == found


async def test_pages_of_live_members_may_call_and_others_may_not(scripted: ScriptedMesh) -> None:
    policy = AccessPolicy(member_origins=lambda: frozenset({"http://10.0.0.2:52415"}))
    async with served(scripted, ApiOptions(access=policy)) as api:
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "idempotency-key"}
        async with api.http.options("/v1/models", headers={"Origin": "http://10.0.0.2:52415", **asks}) as reply:
            assert reply.status == 204
            assert reply.headers["Access-Control-Allow-Origin"] == "http://10.0.0.2:52415"
            assert {"Authorization", "Last-Event-ID", "Idempotency-Key"} <= set(
                reply.headers["Access-Control-Allow-Headers"].split(", ")
            )
        async with api.http.get("/v1/models", headers={"Origin": "http://10.0.0.3:52415"}) as reply:
            assert reply.status == 403


async def test_files_are_kept_by_browsers_and_change_their_path_with_their_content(api: Served) -> None:
    base = PageAssets().base
    async with api.http.get(f"{base}/style.css", headers={"Accept-Encoding": "gzip"}) as reply:
        assert reply.headers["Cache-Control"] == "public, max-age=31536000, immutable"
        assert reply.headers["Content-Encoding"] == "gzip"
        assert await reply.read() == (FOLDER / "style.css").read_bytes()
    async with api.http.get(f"{base}/app/main.js", headers={"Accept-Encoding": "identity"}) as reply:
        assert reply.content_type == "text/javascript"
        assert "Content-Encoding" not in reply.headers
        assert await reply.read() == (FOLDER / "app" / "main.js").read_bytes()
    async with api.http.get("/page/0000/style.css") as reply:
        assert reply.status == 404


async def test_a_language_comes_compressed(api: Served) -> None:
    async with api.http.get("/page/languages/de", headers={"Accept-Encoding": "gzip"}) as reply:
        assert reply.headers["Content-Encoding"] == "gzip"
        assert (await reply.json()).keys() == ENGLISH.keys()


def test_the_version_changes_with_any_file(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("1")
    before = PageAssets(tmp_path).version
    (tmp_path / "a.js").write_text("2")
    assert PageAssets(tmp_path).version != before


@pytest.mark.parametrize("name", ["assets.py", "../app.py", "%2e%2e/app.py", "..%2fapp.py", "vendor", "", "LICENSE"])
async def test_nothing_else_is_served(api: Served, name: str) -> None:
    async with api.http.get(f"{PageAssets().base}/{name}") as reply:
        assert reply.status == 404


async def test_a_headless_node_has_no_page(scripted: ScriptedMesh) -> None:
    async with served(scripted, ApiOptions(headless=True)) as api:
        for path in ("/", "/dashboard", "/service-worker.js", f"{PageAssets().base}/style.css"):
            async with api.http.get(path, headers=HTML) as reply:
                assert (reply.status, reply.content_type) == (404, "application/json")
                assert (await reply.json())["error"]["code"] == "not_found"


@pytest.mark.parametrize("path", ["/", "/<script>alert(1)</script>", "/v1/models/<img src=x onerror=alert(1)>"])
async def test_what_a_caller_writes_comes_back_as_json_only(api: Served, path: str) -> None:
    async with api.http.get(path, headers={"Host": "<script>alert(1)</script>", "Accept": "*/*"}) as reply:
        assert reply.content_type == "application/json"
        assert reply.headers["X-Content-Type-Options"] == "nosniff"


def test_vendored_files_are_those_of_the_manifest() -> None:
    vendor = FOLDER / "vendor"
    found = {path.relative_to(vendor).as_posix() for path in vendor.rglob("*") if path.is_file()} - {"manifest.json"}
    listed = {}
    for library in json.loads((vendor / "manifest.json").read_text()):
        assert library["package"].endswith("@" + library["version"])
        assert library["license"] in ("MIT", "Apache-2.0", "BSD-3-Clause")
        assert "LICENSE" in library["files"]
        listed.update({f"{library['name']}/{name}": file["sha256"] for name, file in library["files"].items()})
    assert listed.keys() == found
    assert listed == {name: hashlib.sha256((vendor / name).read_bytes()).hexdigest() for name in found}


def test_the_stages_have_the_same_colours_on_the_page_and_in_a_terminal() -> None:
    text = (FOLDER / "stages.css").read_text()
    dark = re.findall(r"--stage-\d: light-dark\(#[0-9a-f]{6}, (#[0-9a-f]{6})\)", text)
    assert tuple(dark) == STAGE_COLOURS
    assert f"COLOURS = {len(dark)};" in (FOLDER / "app" / "who_computed.js").read_text()


FIRST_LOAD_BYTES = 160_000
ALL_BYTES = 650_000


def imported(name: str) -> set[str]:
    """The modules that a module loads at once, itself included, by their paths in the folder."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        if (one := waiting.pop()) in found:
            continue
        found.add(one)
        text = (FOLDER / one).read_text()
        sources = re.findall(r'(?:^|[\n;])\s*(?:import|export)\s*(?:[^"\'();]*?\sfrom\s*)?"(\.[^"]+)"', text)
        waiting += [
            (FOLDER / one).parent.joinpath(source).resolve().relative_to(FOLDER).as_posix() for source in sources
        ]
    return found


def test_the_page_is_small() -> None:
    assets = PageAssets()
    sizes = {name: len(asset.body) for name in assets.names if (asset := assets.asset(name)) is not None}
    at_once = imported("app/main.js")
    assert {"app/chat.js", "vendor/marked/marked.esm.js", "vendor/preact/preact.mjs"} <= at_once
    first = {"index.html", "icon.svg", "strings/en.json", "strings/de.json", *at_once}
    first |= set(re.findall(r'href="{{base}}/([^"]+)"', (FOLDER / "index.html").read_text()))
    assert sum(sizes[name] for name in first) <= FIRST_LOAD_BYTES
    assert sum(sizes.values()) <= ALL_BYTES
    assert "app/traces.js" not in at_once, "the other views come after the chat"
    assert not [name for name in at_once if "katex" in name or "highlight" in name], "loaded with the first use"


def test_every_language_has_every_string() -> None:
    for path in (FOLDER / "strings").glob("*.json"):
        strings = json.loads(path.read_text())
        assert strings.keys() == ENGLISH.keys(), path.name
        marks = {name: set(re.findall(r"\{\w+\}", text)) for name, text in strings.items()}
        assert marks == {name: set(re.findall(r"\{\w+\}", text)) for name, text in ENGLISH.items()}, path.name


def test_every_string_that_the_page_shows_exists() -> None:
    text = "\n".join(path.read_text() for path in OWN)
    used = set(re.findall(r'"([a-z]+\.\w+)"', text)) - {
        f"exo.{name}" for name in ("key", "token", "session", "theme", "language", "presets", "members")
    }
    groups = set(re.findall(r"t\(`([a-z]+)\.\$\{", text))
    assert used <= ENGLISH.keys()
    unused = {name for name in ENGLISH.keys() - used if name.split(".")[0] not in groups}
    assert not unused


def test_the_page_names_no_other_site() -> None:
    addresses = {found for path in OWN for found in re.findall(r"(?:https?:)?//[\w.-]+\.\w+", path.read_text())}
    assert not addresses


def test_the_documents_show_all_pictures_and_these_are_small() -> None:
    root = Path(__file__).resolve().parents[2]
    pictures = {path.name: path.stat().st_size for path in (root / "docs" / "images").iterdir()}
    pages = (root / "docs" / "tasks" / "page.md").read_text() + (root / "README.md").read_text()
    shown = set(re.findall(r"images/([\w.-]+)\)", pages))
    assert shown == pictures.keys()
    assert len(pictures) <= 9
    assert max(pictures.values()) <= 60_000


async def test_the_page_can_be_installed_and_its_worker_keeps_all_its_files(api: Served) -> None:
    assets = PageAssets()
    manifest = assets.asset("app.webmanifest")
    assert manifest is not None and manifest.content_type == "application/manifest+json"
    described = json.loads(gzip.decompress(manifest.body))
    assert (described["start_url"], described["display"]) == ("/dashboard", "standalone")
    async with api.http.get("/service-worker.js") as reply:
        assert (reply.status, reply.content_type) == (200, "text/javascript")
        assert reply.headers["Cache-Control"] == "no-cache"
        text = await reply.text()
    kept = json.loads("[" + text.partition("const FILES = [")[2].partition("];")[0] + "]")
    assert set(kept) == {f"{assets.base}/{name}" for name in assets.names - {"index.html", "worker.js"}}
    assert f'const VERSION = "{assets.version}";' in text and "{{" not in text


def test_files_compress_the_same_each_time() -> None:
    asset = PageAssets().asset("index.html")
    assert asset is not None and asset.gzipped
    assert b"{{base}}" in gzip.decompress(asset.body)
