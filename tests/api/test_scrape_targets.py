"""What Prometheus is told of the nodes of a mesh, and the count of answers that it reads."""

from __future__ import annotations

from typing import Any

import pytest

from exo_mesh.api.context import ApiOptions
from exo_mesh.api.scrape_targets import scrape_targets
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.domain.reports import StateReport
from tests.api.scripted_mesh import ScriptedMesh, served
from tests.support.reports import report_of


def peer(name: str, api_url: str, **others: Any) -> dict[str, Any]:
    return {"id": name * 3, "name": name, "alive": True, "version": "1.2", "api_url": api_url, **others}


def state(*peers: dict[str, Any], links: tuple[tuple[str, str, str], ...] = ()) -> StateReport:
    shown = [{"from": one, "to": other, "address": address} for one, other, address in links]
    return report_of(StateReport, node_id="aaa", view={"peers": list(peers)}, links=shown)


def test_each_node_is_scraped_where_the_asked_one_reaches_it() -> None:
    links = (("aaa", "bbb", "10.1.0.2:52416"), ("bbb", "ccc", "10.9.9.9:52416"), ("aaa", "ddd", "[fe80::2]:52416"))
    found = scrape_targets(
        state(
            peer("a", "http://10.0.0.1:52415"),
            peer("b", "http://172.17.0.1:52415"),
            peer("c", "https://10.0.0.3:443"),
            peer("d", "http://[fd00::4]:8080"),
            links=links,
        )
    )
    targets = [(*one.targets, one.labels["__scheme__"], one.labels["node"]) for one in found]
    assert targets == [
        ("10.0.0.1:52415", "http", "a"),
        ("10.1.0.2:52415", "http", "b"),
        ("10.0.0.3:443", "https", "c"),
        ("[fd00::4]:8080", "http", "d"),
    ]
    assert all(isinstance(value, str) for one in found for value in one.labels.values())


def test_a_node_that_is_reached_over_a_link_local_address_is_scraped_at_its_announced_one() -> None:
    links = (
        ("aaa", "bbb", "[fe80::2%eth0]:5000"),
        ("aaa", "ccc", "[fe80::3%eth0]:5000"),
        ("aaa", "ddd", "169.254.0.4:5000"),
    )
    urls = {"b": "http://192.168.1.2:52415", "c": "http://[fe80::3]:52415", "d": "http://10.0.0.4:52415"}
    found = scrape_targets(state(*(peer(name, url) for name, url in urls.items()), links=links))
    assert [one.targets for one in found] == [["192.168.1.2:52415"], ["169.254.0.4:52415"]]


@pytest.mark.parametrize(
    "url", ["", "ftp://a:1", "http://a", "http://a:1:2", "http://a:99999", "http://a b:1", "http://[:1"]
)
def test_what_is_no_address_of_an_api_is_left_out(url: str) -> None:
    assert scrape_targets(state(peer("a", url), peer("b", "http://b:1"))) == scrape_targets(
        state(peer("b", "http://b:1"))
    )
    assert scrape_targets(state(peer("a", "http://a:1", alive=False))) == []


async def test_answers_are_counted_by_route_and_strangers_make_no_series(model_dir: Any) -> None:
    metrics = Metrics()
    options = ApiOptions(registry=lambda: metrics.registry, responses=metrics.http_responses)
    async with served(ScriptedMesh(model_dir), options) as api:
        asked = [("GET", f"/v1/models/{name}") for name in "mn"] + [("GET", "/x1"), ("GET", "/x2"), ("PROPFIND", "/")]
        for method, path in asked:
            async with api.http.request(method, path):
                pass
    counted = {labels: cell.value for labels, cell in metrics.http_responses.series()}
    assert counted == {("GET", "/v1/models/{id}", "404"): 2, ("GET", "other", "404"): 2, ("other", "other", "405"): 1}
