"""What is read of a page, and what a page can do to its reader."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import psutil
import pytest

from exo_mesh.api.webtools.article import article_of
from exo_mesh.api.webtools.children import MAX_WAITING
from exo_mesh.api.webtools.page_child import PageQuestion, decoded
from exo_mesh.api.webtools.page_text import read_page
from exo_mesh.api.webtools.reading import PageReaders
from exo_mesh.errors import InputError, OverloadError
from tests.api.webtools.web_server import PAGE


def test_the_text_of_a_page_is_what_a_person_reads() -> None:
    assert read_page(PAGE) == ("A mesh & more", "# Rings\n\nOne peer sends to the next.\n\n- first\n- second")


def test_a_long_article_is_all_that_counts() -> None:
    words = "word " * 60
    title, text = read_page(f"<p>advert</p><article><p>{words}</p></article><p>more adverts</p>")
    assert (title, text) == ("", words.strip())


def test_a_page_of_menus_only_is_shown_with_its_menus() -> None:
    assert read_page("<nav><p>Home<p>About</nav>") == ("", "Home\n\nAbout")


def test_an_element_that_is_never_closed_hides_nothing_behind_its_parent() -> None:
    assert read_page("<div><script>x()</div><p>seen")[1] == ""  # a script ends at </script> only
    assert read_page("<div><form><b>Log in</div><p>seen")[1] == "seen"


def test_preformatted_text_keeps_its_lines() -> None:
    assert read_page("<pre>a\n  b</pre>")[1].startswith("a\n")


@pytest.mark.parametrize(
    ("body", "charset", "text"),
    [
        ("grüße".encode(), "", "grüße"),
        ("grüße".encode("latin-1"), "iso-8859-1", "grüße"),
        (b'<meta charset="latin-1">gr\xfc\xdfe', "", '<meta charset="latin-1">grüße'),
        ("grüße".encode("utf-16"), "", "grüße"),
        ("grüße".encode("utf-8-sig"), "latin-1", "grüße"),
        ("grüße".encode(), "no-such-charset", "grüße"),
        (b"eJw=", "zlib", "eJw="),
        (b"\xff", "utf-8", "\ufffd"),
    ],
)
def test_a_page_is_decoded_by_its_mark_its_headers_or_itself(body: bytes, charset: str, text: str) -> None:
    assert decoded(body, charset) == text


async def test_a_child_process_reads_a_page_and_cuts_its_text() -> None:
    question = PageQuestion(is_html=True, charset="utf-8", max_chars=7)
    answer = await PageReaders().read(PAGE.encode(), question)
    assert (answer.title, answer.text, answer.is_cut) == ("A mesh & more", "# Rings", True)


async def test_a_page_that_exhausts_its_reader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exo_mesh.api.webtools.reading.WALL_LIMIT_S", 0.01)
    with pytest.raises(InputError, match="too long"):
        await PageReaders().read(PAGE.encode(), PageQuestion(is_html=True, charset="", max_chars=500))


async def test_more_pages_than_the_limit_are_refused_and_the_others_are_read() -> None:
    readers, question = PageReaders(), PageQuestion(is_html=False, charset="", max_chars=500)
    reading = [asyncio.create_task(readers.read(b"a page", question)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadError):
        await readers.read(b"one more", question)
    assert {answer.text for answer in await asyncio.gather(*reading)} == {"a page"}
    assert (await readers.read(b"one more", question)).text == "one more"


@pytest.mark.extended
async def test_a_page_that_is_written_to_exhaust_a_parser_is_stopped_by_the_system() -> None:
    hostile = b"<a " * 300_000  # the parser looks for the end of each tag, up to the end of the page
    with pytest.raises(InputError, match=r"too much time or memory|too long"):
        await PageReaders().read(hostile, PageQuestion(is_html=True, charset="", max_chars=500))
    assert not [one for one in psutil.Process().children(recursive=True) if "page_child" in " ".join(one.cmdline())]


ARTICLE = (
    "<html><head><title>Rings</title></head><body><div class=cookies><p>We use cookies, accept them all.</p></div>"
    "<div class=content><h1>Rings of machines</h1>"
    + "".join(
        f"<p>Peer {n} sends its activations to peer {n + 1}, which computes the next layers.</p>" for n in range(9)
    )
    + "<ul><li>first hop</li><li>second hop</li></ul></div>"
    "<div class=sidebar><h3>Related</h3><ul><li><a href=/a>Ten tips for your garden</a></li></ul></div></body></html>"
)
"""Its content is in no <main> or <article>, so only its words tell it from what is around."""


async def test_trafilatura_finds_the_article_that_no_tag_names() -> None:
    pytest.importorskip("trafilatura")
    answer = await PageReaders().read(ARTICLE.encode(), PageQuestion(is_html=True, charset="utf-8", max_chars=5000))
    assert answer.title == "Rings"
    assert answer.text.startswith("# Rings of machines\n\nPeer 0 sends") and answer.text.endswith("- second hop")
    assert "cookies" not in answer.text and "garden" not in answer.text
    assert "garden" in read_page(ARTICLE)[1], "the reader of our own cannot tell"


async def test_a_short_page_is_read_by_our_own_reader_whatever_is_installed() -> None:
    answer = await PageReaders().read(PAGE.encode(), PageQuestion(is_html=True, charset="utf-8", max_chars=500))
    assert answer.text == read_page(PAGE)[1]


def test_a_library_that_fails_or_is_missing_leaves_the_page_to_our_own_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trafilatura", None)  # as if it were not installed
    assert article_of(ARTICLE) == ""
    monkeypatch.setitem(sys.modules, "trafilatura", SimpleNamespace(extract=lambda *_, **__: 1 / 0))
    assert article_of(ARTICLE) == ""
