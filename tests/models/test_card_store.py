"""Custom cards: kept in files of one machine, known to all peers, deleted from any of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exo_mesh.domain.view import MAX_CARDS_PER_OWNER, CardInfo
from exo_mesh.errors import InputError, ModelError, UnknownModelError
from exo_mesh.machine.disk import Disk
from exo_mesh.models.cards.card_store import CardStore, shipped_cards
from exo_mesh.models.cards.toml_card import TomlCard
from exo_mesh.node.node import Node
from tests.support.nodes import MODEL, Machine, make_node, mesh, until

CARD = TomlCard(id="org/name", aliases=("mine:1b",), architecture="llama")


@pytest.fixture
def new_shelf(tmp_path: Path) -> Callable[..., CardStore]:
    """Shelves of one node that is not started."""
    node = make_node(tmp_path / "node", "n", Machine())

    def make(*directories: Path, **options: Any) -> CardStore:
        directories = directories or (tmp_path / "cards",)
        return CardStore(directories, node.membership, Disk(tmp_path), **options)

    return make


def shelf(node: Node) -> CardStore:
    return node._models.shelf


async def test_a_card_added_at_one_peer_is_known_at_all_and_deleted_at_any(tmp_path: Path) -> None:
    async with mesh(tmp_path, 3, open_admin=True) as (a, b, c):
        await shelf(a).add_card(CARD)
        file = tmp_path / "n0" / "cards" / "org--name.toml"
        assert file.is_file()
        await until(lambda: all("org/name" in shelf(node).cards() for node in (b, c)), 3.0)
        assert shelf(b).cards()["org/name"].is_custom and not (tmp_path / "n1" / "cards").exists()
        assert a.membership.view.digest() == b.membership.view.digest()
        assert (await b._models.catalogue.reference("mine:1b")).repo == "org/name"
        with pytest.raises(UnknownModelError, match="no peer has the files of org/name"):
            await b.models.named("mine:1b")
        assert await shelf(b).delete_card("mine:1b")
        await until(lambda: all("org/name" not in shelf(node).cards() for node in (a, b, c)), 3.0)
        assert not file.exists()
        assert not await shelf(c).delete_card("org/name")


async def test_a_card_that_is_not_there_cannot_be_deleted_and_near_ones_are_named(tmp_path: Path) -> None:
    async with mesh(tmp_path, 1) as (node,):
        assert not await node.models.delete_card("org/nam"), "there are no custom cards at all"
        await shelf(node).add_card(CARD)
        with pytest.raises(UnknownModelError, match=r"no custom card org/nam; similar names: org/name$"):
            await node.models.delete_card("org/nam")


async def test_a_model_is_found_by_the_aliases_of_its_card(tmp_path: Path) -> None:
    (tmp_path / "n0" / "cards").mkdir(parents=True)
    (tmp_path / "n0" / "cards" / "demo.toml").write_text(f'id = "{MODEL}"\naliases = ["demo:tiny"]\nfamily = "toy"\n')
    async with mesh(tmp_path, 1) as (node,):
        await until(lambda: node.models.all()[0].aliases)
        for name in ("demo:tiny", "DEMO:TINY", f"{MODEL}:latest", MODEL.upper()):
            entry = await node.models.named(name)
            assert (entry.name, entry.aliases) == (MODEL, ("demo:tiny",))
        assert entry.profile is not None and entry.profile.family == "toy"
        with pytest.raises(UnknownModelError, match=r'no peer has a model "demo:tinny"; near: demo:tiny, '):
            await node.models.named("demo:tinny")


async def test_cards_are_read_from_all_directories_and_the_first_wins(
    tmp_path: Path, new_shelf: Callable[..., CardStore]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for directory, family in ((one, "first"), (two, "second")):
        directory.mkdir()
        (directory / "x.toml").write_text(f'id = "org/name"\nfamily = "{family}"\n')
    (two / "several.toml").write_text('[[cards]]\nid = "org/a"\n[[cards]]\nid = "Qwen/Qwen3-0.6B"\nfamily = "mine"\n')
    (two / "broken.toml").write_text('id = "org/b"\ncolour = 3\n')
    shelf = new_shelf(one, two)
    await shelf.rescan()
    assert shelf.cards()["org/name"].family == "first" and "org/a" in shelf.cards()
    assert shelf.cards()["Qwen/Qwen3-0.6B"].family == "mine", "a custom card wins over a shipped one"
    assert shelf.unusable == {"broken.toml": "broken.toml: colour: there is no such field"}
    with pytest.raises(InputError, match=r"several\.toml has other cards too"):
        await shelf.delete_own("org/a")
    (two / "several.toml").unlink()
    await shelf.rescan()
    assert "org/a" not in shelf.cards() and shelf.cards()["Qwen/Qwen3-0.6B"].family == "qwen"


async def test_the_number_of_custom_cards_is_bounded(tmp_path: Path, new_shelf: Callable[..., CardStore]) -> None:
    lines = [f'[[cards]]\nid = "org/m{n}"\n' for n in range(MAX_CARDS_PER_OWNER)]
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "many.toml").write_text("".join(lines))
    shelf = new_shelf()
    with pytest.raises(InputError, match="32 custom cards"):
        await shelf.add_card(CARD)
    with pytest.raises(InputError, match=r"many.toml has other cards besides org/m1"):
        await shelf.add_card(TomlCard(id="org/m1"))


async def test_a_card_that_cannot_be_used_is_not_kept(tmp_path: Path, new_shelf: Callable[..., CardStore]) -> None:
    shelf = new_shelf()
    for card in (TomlCard(id="../up"), TomlCard(id="org/name", n_layers=3), TomlCard(id="a" * 300)):
        with pytest.raises(ModelError, match=re.escape(card.id)):
            await shelf.add_card(card)
    assert not (tmp_path / "cards").exists()


async def test_what_a_peer_says_is_checked_and_cannot_replace_this_machines_card(
    tmp_path: Path, new_shelf: Callable[..., CardStore]
) -> None:
    shelf = new_shelf()
    await shelf.add_card(CARD)
    for text in ("", "id = 3", 'id = "org/other"', 'id = "org/name"\nx = 1', "\x00"):
        assert shelf._cards_of_peers([("org/new", "peer", CardInfo(text))]) == {}
    good = 'id = "org/new"\nfamily = "{}"'
    found = shelf._cards_of_peers([("org/new", owner, CardInfo(good.format(owner))) for owner in ("p1", "p2")])
    assert found["org/new"].family == "p1" and found["org/new"].is_custom


async def test_remote_code_needs_the_flag_and_a_card_of_this_machine(
    tmp_path: Path, new_shelf: Callable[..., CardStore]
) -> None:
    trusting = TomlCard(id="org/code", trust_remote_code=True)
    careful, willing = new_shelf(), new_shelf(allow_code=True)
    await careful.add_card(trusting)
    await willing.rescan()
    assert not careful.allows_code("org/code") and willing.allows_code("org/code")
    assert willing.allows_code("org/code@v2") and not willing.allows_code("org/name")
    assert not any(willing.allows_code(card.id) for card in shipped_cards())
    elsewhere = new_shelf(tmp_path / "none", allow_code=True)
    elsewhere._of_peers = {("org/code", CardInfo("x")): trusting}
    assert not elsewhere.allows_code("org/code")
