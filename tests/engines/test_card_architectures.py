"""Every shipped card's architecture runs on an engine that claims it, as a tiny random model; or the page of cards says
why it does not."""

from __future__ import annotations

import datetime
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from exo_mesh_mlx.provider import _remapping
from exo_mesh_torch.families import VISION_FAMILIES

from exo_mesh.engine.contract import EngineProvider
from exo_mesh.models.cards.card_store import shipped_cards
from tools.architectures.check import check
from tools.architectures.pages import PAGES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cards.md"
BUDGET_S = 6.0
"""No architecture is begun after so long."""

RUNS = ("exact", "whole")
ORACLES = ("numpy", "llamacpp")
"""Engines whose own tests compare each family that they claim with transformers, like those of torch for images."""


@cache
def providers() -> dict[str, EngineProvider]:
    found = {}
    for name in ("mlx", "torch", *ORACLES):
        provider = import_module(f"exo_mesh_{name}").provider
        if not provider.availability().available:
            pytest.skip(f"{name} is not installed")
        found[name] = provider
    return found


def mapped(architecture: str) -> str:
    """The row of a page for an architecture: mlx-lm runs some under another name."""
    return _remapping().get(architecture, architecture)


def claims() -> list[tuple[str, str]]:
    """(engine, architecture) of each card that MLX or torch claims, in one order."""
    able = providers()
    named = sorted({card.architecture for card in shipped_cards() if card.architecture})
    claimed = [(engine, name) for name in named for engine in ("mlx", "torch") if able[engine].supports(name)]
    return [(engine, name) for engine, name in claimed if name not in VISION_FAMILIES or engine != "torch"]


def states_of(architecture: str) -> Mapping[str, str]:
    """By engine: how the pages of architectures say that it went."""
    found = {}
    for engine, provider in providers().items():
        if provider.supports(architecture):
            name = mapped(architecture) if engine == "mlx" else architecture
            compared = engine in ORACLES or (engine == "torch" and name in VISION_FAMILIES)
            found[engine] = "exact" if compared else PAGES[engine].states().get(name, "")
    return found


def test_every_card_runs_on_an_engine_or_the_page_says_why_not() -> None:
    cards = defaultdict(set)
    for card in shipped_cards():
        if card.architecture and "drafting" not in card.tasks:
            cards[card.architecture].add(card.id)
    idle = {name for name in cards if not set(states_of(name).values()) & set(RUNS)}
    table = PAGE.read_text().partition("## Models that no engine runs")[2].partition("\n##")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.M))
    assert set(listed) == idle
    assert {name: set(re.findall(r"`([^`]+)`", models)) for name, models in listed.items()} == {
        name: cards[name] for name in idle
    }


@pytest.mark.extended
@pytest.mark.timeout(120)
def test_some_architectures_of_cards_are_built_and_run() -> None:
    """Others each day: every twentieth, in turns."""
    day = datetime.datetime.now(datetime.UTC).date().toordinal()
    begin = time.monotonic()
    tried = 0
    for engine, name in claims()[day % 20 :: 20]:
        if time.monotonic() - begin > BUDGET_S:
            break
        assert not unlike_the_page(engine, name)
        tried += 1
    assert tried


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_architectures_of_cards_are_built_and_run() -> None:
    wrong = [one for engine, name in claims() if (one := unlike_the_page(engine, name))]
    assert wrong == []


def unlike_the_page(engine: str, name: str) -> str:
    """What is wrong with a model; "" if it is as its row on the page says."""
    outcome = check(engine, name, few=True)
    says = states_of(name)[engine]
    is_right = outcome.state == says and outcome.state != "failed"
    return "" if is_right else f"{engine} {name} is {outcome.state}, not {says}: {outcome.reason}"
