"""The picture of the mesh: every peer, link, bar and layer range of `/state` is in it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from exo_mesh.cli.topology_picture import goodput_text, layer_bar, memory_bar, picture
from exo_mesh.cli.verbs.preview import describe
from exo_mesh.cli.verbs.topology import run, speeds, watch
from exo_mesh.domain.reports import StateReport
from exo_mesh.errors import InputError, TransportError
from tests.support.reports import reply_of

GB = 10**9


def reading(usable: int, reserved: int, total: int = 16 * GB, **more: Any) -> dict[str, Any]:
    return {"usable_bytes": usable, "total_bytes": total, "reserved_bytes": reserved, "load": 0.5, **more}


def a_state(tokens: int = 120) -> dict[str, Any]:
    peers = [
        {"id": f"id-{name}", "name": name, "alive": True, "devices": [{"engine": "mlx"}]}
        for name in ("alpha", "beta", "gamma")
    ]
    stages = [
        {"peer": "id-alpha", "engine": "mlx", "layers": [0, 6], "reserve_bytes": 3 * GB},
        {"peer": "id-beta", "engine": "mlx", "layers": [6, 8], "reserve_bytes": GB},
    ]
    instance = {
        "id": "m-1", "model": "m", "state": "ready", "owner": "id-beta", "ballot": [2, "id-beta"], "stages": stages,
    }  # fmt: skip
    return reply_of(
        StateReport,
        node_id="id-alpha",
        view={"peers": peers, "instances": [instance]},
        telemetry={"id-alpha": reading(8 * GB, 3 * GB), "id-beta": reading(2 * GB, GB, tokens={"m-1": tokens})},
        links=[{"from": "id-alpha", "to": "id-beta", "address": "10.0.0.2:5000", "rtt_ms": 0.4213}],
    )


def drawn(renderable: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=120, highlight=False).print(renderable)
    return out.getvalue()


def test_everything_that_is_known_is_in_the_picture() -> None:
    text = drawn(picture(a_state(), {"m-1": 17.25}))
    for part in (
        "alpha (here)", "beta", "gamma", "no reading yet", "8.0 GB usable, 3.0 GB reserved", "alpha ↔ beta", "0.42 ms",
        "layers 0-5", "layers 6-7", "instance m-1, ready, ballot 2 of beta, 120 tokens, 17.2 tokens/s", "1.0 GB",
    ):  # fmt: skip
        assert part in text, part


def test_a_mesh_without_models_says_so() -> None:
    state = a_state()
    state["view"]["instances"] = []
    assert "no model is loaded" in drawn(picture(state))


@pytest.mark.parametrize(
    ("usable", "reserved", "bar"),
    [(8, 4, "██▒▒····"), (16, 0, "········"), (0, 16, "████████"), (0, 0, "▒▒▒▒▒▒▒▒"), (15, 0.1, "█·······")],
)
def test_a_memory_bar_shows_reserved_others_and_usable(usable: float, reserved: float, bar: str) -> None:
    assert memory_bar(reading(int(usable * GB), int(reserved * GB)), 8).plain == bar


def test_the_age_of_a_measured_goodput_is_shown() -> None:
    link = {"from": "a", "to": "b", "mb_per_s": 6.2, "mb_per_s_at": 1000.0}
    assert goodput_text(link, 1300.0) == "6 MB/s, 5 min ago"
    assert goodput_text({**link, "mb_per_s_at": None}, 1300.0) == "6 MB/s", "another peer reported it"
    assert goodput_text({**link, "mb_per_s": None}, 1300.0) == "?"


def test_layer_bars_of_a_ring_cover_all_layers_once() -> None:
    bars = [layer_bar(layers, 8, "", 8).plain for layers in ([0, 6], [6, 8])]
    assert bars == ["██████──", "──────██"]
    assert layer_bar([60, 61], 61, "", 8).plain == "───────█", "one layer of many is still to be seen"


def test_speeds_are_differences_and_a_new_driver_starts_at_nothing() -> None:
    assert speeds(a_state(100), a_state(150), 2.0) == {"m-1": 25.0}
    assert speeds(a_state(100), a_state(3), 2.0) == {"m-1": 0.0}
    first = a_state(7)
    first["telemetry"] = {}
    assert speeds(first, a_state(9), 1.0) == {"m-1": 0.0}


def test_watching_goes_on_until_it_is_interrupted() -> None:
    times: Iterator[float] = iter([0.0, 1.0, 2.0])
    pauses = iter([None, None])

    def sleep(_: float) -> None:
        if next(pauses, "end") == "end":
            raise KeyboardInterrupt

    counts = iter([100, 130, 160])
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, highlight=False)
    watch(lambda: a_state(next(counts)), console, lambda: next(times), sleep)
    assert "160 tokens, 30.0 tokens/s" in out.getvalue()


def test_a_node_that_goes_away_ends_watching_with_its_error() -> None:
    states = iter([a_state()])

    def read() -> dict[str, Any]:
        try:
            return next(states)
        except StopIteration:
            raise TransportError("nothing answers") from None

    with pytest.raises(TransportError):
        watch(read, Console(file=io.StringIO(), width=120), lambda: 0.0, lambda _: None)


def test_json_cannot_be_watched() -> None:
    from argparse import Namespace

    with pytest.raises(InputError, match="--watch"):
        run(Namespace(api_url=None, home=None, json=True, watch=True))


def test_a_preview_for_people_has_the_arithmetic_or_the_reason() -> None:
    stage = {
        "peer": "id-alpha", "name": "alpha", "engine": "mlx", "layers": [0, 8], "weights_bytes": 5 * GB,
        "kv_bytes": 10**8, "overhead_bytes": 268435456, "usable_bytes": 8 * GB, "headroom_bytes": 2631564544,
    }  # fmt: skip
    entry = {
        "width": 1, "policies": ["memory", "latency"], "context_limit": 4096, "kv_pool_tokens": 8192, "stages": [stage],
    }  # fmt: skip
    text = describe(entry)
    assert text.startswith(
        "1 peer (--policy memory or latency): context 4096 tokens, KV for 8192 tokens on every stage"
    )
    shown = " ".join(text.splitlines()[2].split())
    assert shown == "alpha 0-7 mlx 5.0 GB 100.0 MB 268.4 MB 8.0 GB 2.6 GB"
    refused = {"width": 2, "policies": ["memory"], "refused": {"message": "needs 9 GB; there is 8 GB."}}
    assert describe(refused) == "2 peers: not possible. needs 9 GB; there is 8 GB."
    group = {"peers": ["id-alpha", "id-beta"], "backend": "jaccl", "rdma": []}
    text = describe({**entry, "width": 2, "stages": [{**stage, "group": group}], "note": "as the cables are"})
    assert text.splitlines()[2].startswith("  alpha + 1 (jaccl)") and text.endswith("as the cables are")
