"""What a card says about the peers that may run its model."""

from __future__ import annotations

import pytest

from exo_mesh.domain.device import Device, EngineInfo, PeerInfo
from exo_mesh.domain.model import NO_RULES, CardRules

TAGGED = PeerInfo(
    id="a" * 8, incarnation=1, name="alpha", version="1", protocol=2, namespace="n", addresses=(),
    devices=(
        Device("gpu", "GPU", ("llamacpp", "torch"), "llamacpp",
               details=(EngineInfo("llamacpp", "vulkan"), EngineInfo("torch", "cuda"))),
    ),
)  # fmt: skip
"""A peer with two engines, `llamacpp-vulkan` and `torch-cuda`."""


@pytest.mark.parametrize(
    ("backends", "allowed"),
    [
        ((), ("llamacpp", "torch")),
        (("mlx",), ()),
        (("torch",), ("torch",)),
        (("llamacpp-vulkan", "torch-rocm"), ("llamacpp",)),
    ],
)
def test_a_backend_is_an_engine_or_its_tag(backends: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    assert CardRules(backends).allowed(TAGGED, TAGGED.engines) == allowed


def test_the_preferred_engine_comes_first_and_the_others_stay() -> None:
    rules = CardRules(preferred=("mlx", "torch-cuda"))
    assert rules.allowed(TAGGED, TAGGED.engines) == ("torch", "llamacpp")
    assert [rules.rank(TAGGED, engine) for engine in ("torch", "llamacpp")] == [1, 2]
    assert NO_RULES.rank(TAGGED, "torch") == 0


def test_a_peer_is_left_out_by_its_memory_its_name_or_its_id() -> None:
    rules = CardRules(min_memory_bytes=24 * 2**30, excluded=("beta", "a" * 8))
    assert rules.why_not(TAGGED, 32 * 2**30) == "is excluded by the card"
    assert CardRules(excluded=("alpha",)).why_not(TAGGED, 0) == "is excluded by the card"
    assert "24 GiB" in CardRules(min_memory_bytes=24 * 2**30).why_not(TAGGED, 16 * 2**30)
    assert CardRules(min_memory_bytes=24 * 2**30, excluded=("beta",)).why_not(TAGGED, 24 * 2**30) == ""
