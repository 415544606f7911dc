"""Pages are fetched from checked addresses only, within limits of redirects, size and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from urllib.parse import quote

import pytest

from exo_mesh.api.webtools.addresses import AddressRules
from exo_mesh.api.webtools.fetching import MAX_BYTES, MAX_FETCHES, PinnedResolver, WebFetcher, _answer
from exo_mesh.api.webtools.lookups import HostLookups
from exo_mesh.errors import DeadlineError, InputError, OverloadError, TransportError
from tests.api.webtools.web_server import Names, WebServer, web_server


@pytest.fixture
async def site() -> AsyncIterator[WebServer]:
    async with web_server() as server:
        yield server


def fetcher(site: WebServer, names: Names | None = None, limit_s: float = 20.0) -> WebFetcher:
    rules = AddressRules(allowed={("127.0.0.1", site.port)})
    return WebFetcher(lambda: rules, names or Names({}), limit_s)


async def test_a_page_arrives_with_its_type_and_status(site: WebServer) -> None:
    page = await fetcher(site).fetch(site.url("/page#part"))
    assert (page.url, page.status, page.content_type) == (site.url("/page"), 200, "text/html")
    assert b"<h1>Rings</h1>" in page.body and not page.is_cut


async def test_a_name_is_called_at_its_checked_address_with_its_own_host_header(site: WebServer) -> None:
    names = Names({"a.example": [["127.0.0.1"]]})
    await fetcher(site, names).fetch(site.url("/page", "a.example"))
    assert site.calls == [("/page", f"a.example:{site.port}")] and names.asked == ["a.example"]


async def test_a_name_whose_address_changes_after_the_check_is_not_looked_up_again(site: WebServer) -> None:
    """The second answer of the name server would be refused; the connection goes to the first one."""
    names = Names({"a.example": [["127.0.0.1"], ["10.0.0.1"]]})
    await fetcher(site, names).fetch(site.url("/page", "a.example"))
    assert names.asked == ["a.example"]


async def test_a_redirect_is_looked_up_and_checked_again(site: WebServer) -> None:
    names = Names({"a.example": [["127.0.0.1"], ["10.0.0.1"]]})
    with pytest.raises(InputError, match="not a public address"):
        await fetcher(site, names).fetch(site.url("/hops/1", "a.example"))
    assert [path for path, _ in site.calls] == ["/hops/1"]


@pytest.mark.parametrize(
    "target",
    ["http://127.0.0.1:1/", "http://169.254.169.254/latest", "http://[::1]/", "file:///etc/passwd", "http://["],
)
async def test_a_redirect_to_what_is_not_public_is_refused(site: WebServer, target: str) -> None:
    with pytest.raises(InputError):
        await fetcher(site).fetch(site.url(f"/to?url={quote(target, safe='')}"))
    assert len(site.calls) == 1


async def test_five_redirects_are_followed_and_six_are_refused(site: WebServer) -> None:
    assert (await fetcher(site).fetch(site.url("/hops/4"))).url == site.url("/page")
    with pytest.raises(InputError, match="more than 5 times"):
        await fetcher(site).fetch(site.url("/hops/5"))


@pytest.mark.parametrize("path", ["/large", "/bomb"])
async def test_no_more_than_the_limit_is_kept_of_a_page_even_if_it_is_packed(site: WebServer, path: str) -> None:
    page = await fetcher(site).fetch(site.url(path))
    assert len(page.body) == MAX_BYTES and page.is_cut


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "2130706433", "0x7f.1", "localhost", "[::1]", "[::ffff:127.0.0.1]"]
)
async def test_this_machine_is_refused_however_it_is_spelt(site: WebServer, host: str) -> None:
    strict = WebFetcher(lambda: AddressRules(ports=frozenset({site.port})), HostLookups().addresses, 20.0)
    with pytest.raises(InputError):
        await strict.fetch(site.url("/page", host))
    assert not site.calls


async def test_a_connection_never_goes_to_an_address_that_was_not_checked(site: WebServer) -> None:
    """Even if the library connected to a literal address by itself."""
    url = AddressRules(ports=frozenset({site.port})).check_url(site.url("/page"))
    with pytest.raises(TransportError):
        async with _answer(url, ["8.8.8.8"]):
            raise AssertionError
    assert not site.calls


async def test_the_resolver_of_a_connection_knows_the_checked_addresses_only() -> None:
    found = await PinnedResolver(["8.8.8.8", "2606:4700::1"]).resolve("a.example", 443)
    assert [one["host"] for one in found] == ["8.8.8.8", "2606:4700::1"]


async def test_a_page_that_does_not_arrive_in_time_is_a_deadline() -> None:
    async def never(_: str, __: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(DeadlineError):
        await WebFetcher(AddressRules, never, 0.01).fetch("http://a.example/")


async def test_more_fetches_than_the_limit_are_refused_and_the_others_go_on() -> None:
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def held(_: str, __: int) -> Sequence[str]:
        begun.release()
        await go_on.wait()
        return ["10.0.0.1"]

    one = WebFetcher(AddressRules, held, 20.0)
    running = [asyncio.create_task(one.fetch("http://a.example/")) for _ in range(MAX_FETCHES)]
    for _ in running:
        await begun.acquire()
    with pytest.raises(OverloadError):
        await one.fetch("http://a.example/")
    go_on.set()
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert all(isinstance(error, InputError) for error in ended)


async def test_a_server_that_does_not_listen_is_reported_without_its_address(site: WebServer) -> None:
    rules = AddressRules(allowed={("127.0.0.1", 1)})
    with pytest.raises(TransportError, match=r"a\.example cannot be reached"):
        await WebFetcher(lambda: rules, Names({"a.example": [["127.0.0.1"]]}), 20.0).fetch("http://a.example:1/")


async def test_a_name_without_an_address_is_the_callers_fault() -> None:
    with pytest.raises(InputError, match="has no address"):
        await HostLookups().addresses("no-such-host.invalid", 80)
