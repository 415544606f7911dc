"""Which models the page offers first, and what it says of where they fit: its own functions, in Node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.page.modules import call_page, needs_node

pytestmark = needs_node
GB = 10**9


def peer(free: float, *, engines: tuple[str, ...] = ("torch",), **fields: Any) -> dict[str, Any]:
    devices = [{"engines": list(engines)}]
    return {
        "usable_bytes": free * GB,
        "role": "full",
        "draining": False,
        "devices": devices,
        "fetches": "hub",
        **fields,
    }


def card(name: str, size: float, *aliases: str, **fields: Any) -> dict[str, Any]:
    family = name.partition("-")[0].rpartition("/")[2].lower()
    described = {"tasks": ["text_generation"], "features": ["tools"], "engines": ["mlx", "torch"], "quantization": ""}
    return {
        "id": name,
        "num_bytes": 0,
        "estimated_bytes": size * GB,
        "family": family,
        "aliases": list(aliases),
        **described,
        **fields,
    }


MESH = {"a": peer(64), "b": peer(24), "c": peer(10), "api": peer(500, role="api"), "drained": peer(500, draining=True)}


def test_a_model_fits_alone_together_or_not_at_all_with_the_numbers(tmp_path: Path) -> None:
    sizes = (5, 16, 60, 85, 95, 0)
    fits = call_page(tmp_path / "a", [("fitting", "fitOf", [card("o/m", size), MESH]) for size in sizes])
    assert [fit and (fit["kind"], fit.get("n")) for fit in fits] == [
        ("each", 3), ("each", 2), ("together", 2), ("together", 3), ("no", None), None,
    ]  # fmt: skip
    assert fits[4]["need"] == 104.5 * GB and fits[4]["have"] == 98 * GB
    texts = call_page(tmp_path / "b", [("fitting", "fitText", [fit]) for fit in fits])
    assert texts == [
        "fits on 3 of 3 machines",
        "fits on 2 of 3 machines",
        "fits over 2 machines together",
        "fits over 3 machines together",
        "too large: needs about 105 GB, 98 GB are free",
        "",
    ]


def test_a_size_is_exact_or_said_to_be_an_estimate(tmp_path: Path) -> None:
    exact, about, none = call_page(
        tmp_path,
        [("fitting", "sizeText", [one]) for one in (card("o/m", 9, num_bytes=8 * GB), card("o/m", 9), card("o/m", 0))],
    )
    assert (exact, about, none) == ("8.0 GB", "about 9.0 GB", "")


def test_a_small_model_comes_first_then_the_best_of_each_family_that_fits(tmp_path: Path) -> None:
    known = [
        card("Q/Qwen-0.6B", 1.2, "qwen:0.6b"),
        card("Q/Qwen-8B", 16, "qwen", "qwen:8b"),
        card("Q/Qwen-14B", 28, "qwen:14b"),
        card("Q/Qwen-Embed", 1, "qwen-embed", tasks=["embeddings"]),
        card("G/Gemma-27B", 54, "gemma"),
        card("L/Llama-405B", 810, "llama"),
        card("K/Kimi-MoE", 20, "kimi", engines=["rkllm"]),
        card("mlx-community/Phi-4bit", 8, "phi", quantization="4bit"),
        card("D/Deep-FP8", 30, "deep", quantization="fp8"),
    ]
    for engines, expected in (
        (("torch", "dummy"), ["Q/Qwen-0.6B", "Q/Qwen-8B", "G/Gemma-27B"]),
        (("mlx",), ["Q/Qwen-0.6B", "Q/Qwen-8B", "mlx-community/Phi-4bit", "G/Gemma-27B"]),
        (("llamacpp",), []),
    ):
        mesh = {"a": peer(40, engines=engines), "b": peer(30, engines=engines)}
        (found,) = call_page(tmp_path / engines[0], [("fitting", "suggested", [known, mesh])])
        assert [one["model"]["id"] for one in found] == expected
    older = [{name: value for name, value in one.items() if name != "engines"} for one in known]
    (found,) = call_page(tmp_path / "older", [("fitting", "suggested", [older, {"a": peer(40)}])])
    assert "Q/Qwen-8B" in [one["model"]["id"] for one in found], "a node of an older version does not name the engines"


def test_the_choice_of_a_model_says_where_those_that_are_not_loaded_fit(tmp_path: Path) -> None:
    on_disk = [
        ("o/Large", 95, "downloaded"),
        ("o/Small", 5, "partial"),
        ("o/Ready", 500, "loaded"),
        ("s/Far", 0, "served"),
    ]
    models = [{**card(name, 0), "num_bytes": size * GB, "status": status} for name, size, status in on_disk]
    words = ("", "O/ SMALL", "nothing")
    found = call_page(tmp_path, [("model_picker", "choices", [models, one, MESH]) for one in words])
    shown = [
        {key: [(one["model"]["id"], one["facts"], one["fits"]) for one in rows] for key, rows in all_} for all_ in found
    ]
    small = ("o/Small", "5.0 GB · fits on 3 of 3 machines", True)
    large = ("o/Large", "95 GB · too large: needs about 105 GB, 98 GB are free", False)
    assert shown[0] == {"chat.ready": [("o/Ready", "", True), ("s/Far", "", True)], "chat.onDisk": [small, large]}
    assert shown[1:] == [{"chat.onDisk": [small]}, {}]


def settings(**values: str) -> list[dict[str, str]]:
    usual = {"host": "0.0.0.0", "namespace": "default", "discovery": "udp,mdns"}
    return [{"name": name, "value": value} for name, value in {**usual, **values}.items()]


def test_how_a_machine_joins_an_open_mesh_follows_from_the_settings_of_the_node(tmp_path: Path) -> None:
    cases = [
        (settings(), "machineOpen", "exo-mesh"),
        (settings(namespace="lab"), "machineOpen", "exo-mesh --namespace lab"),
        (settings(discovery="none"), "machineByAddress", "exo-mesh --bootstrap-peers 10.0.0.1:5000"),
        (
            settings(discovery="tailscale", namespace="x"),
            "machineByAddress",
            "exo-mesh --namespace x --bootstrap-peers 10.0.0.1:5000",
        ),
        (settings(host="127.0.0.1"), "machineLocal", ""),
    ]
    found = call_page(tmp_path, [("joining", "joinBy", [given, ["10.0.0.1:5000"]]) for given, _, _ in cases])
    assert found == [{"text": f"first.{text}", "command": command} for _, text, command in cases]
