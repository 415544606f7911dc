"""All cards that a node knows: the shipped cards, cards in files of this machine, and cards of its peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec
from msgspec.structs import replace

from exo_mesh.domain.embedding import GENERATION
from exo_mesh.domain.model import NO_RULES, CardRules, ModelCard
from exo_mesh.domain.view import MAX_CARD_BYTES, MAX_CARDS_PER_OWNER, CardInfo
from exo_mesh.domain.whole.served import SERVED_ARCHITECTURE
from exo_mesh.errors import InputError, MeshError, ModelError
from exo_mesh.machine.disk import Disk
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.calls import delete_card
from exo_mesh.models.cards.runner_kinds import runner_of
from exo_mesh.models.cards.toml_card import TomlCard, card_to_toml, read_card_text, read_cards
from exo_mesh.models.names import near_names
from exo_mesh.weights.model_files import one_line

MAX_FILE_BYTES = MAX_CARDS_PER_OWNER * MAX_CARD_BYTES
MAX_FILES = 256
"""Most files that are read in one directory."""

_log = logging.getLogger(__name__)


class _OwnCard(msgspec.Struct, frozen=True):
    """A card of this machine. is_alone: its file has no other card, so the file can be deleted with the card."""

    card: TomlCard
    file: Path
    is_alone: bool


class _Joined(msgspec.Struct, frozen=True):
    """Cards by id, and ids by lower-case name, computed from the view at this version of its cards."""

    version: int
    own: Mapping[str, _OwnCard]
    cards: Mapping[str, TomlCard]
    names: Mapping[str, str]


class CardStore:
    """Merges cards by id: this machine's card wins, then that of the peer with the lowest id, then the shipped card."""

    def __init__(
        self, directories: Sequence[Path], membership: Membership, disk: Disk, *, allow_code: bool = False
    ) -> None:
        """directories: of custom card files; a new card is written into the first one. allow_code: whether this machine
        may run code that comes with a model, if the model's card asks for it."""
        self._directories = tuple(directories)
        self._membership = membership
        self._disk = disk
        self._allow_code = allow_code
        self._own: dict[str, _OwnCard] = {}
        self._stamp: object = ()
        self._of_peers: dict[tuple[str, CardInfo], TomlCard | None] = {}
        self._joined: _Joined | None = None
        self._turn = asyncio.Lock()
        self.unusable: dict[str, str] = {}
        """The reason why a file of custom cards cannot be used, by file name."""

    # known cards

    def cards(self) -> Mapping[str, TomlCard]:
        """All cards by id."""
        return self._join().cards

    def ids(self) -> Mapping[str, str]:
        """Card ids by id and by each alias, both in lower case."""
        return self._join().names

    def card(self, name: str) -> TomlCard | None:
        """The card of a model by its id or an alias; the card of `org/name` also stands for `org/name@revision`."""
        joined = self._join()
        card_id = joined.names.get(name.lower()) or joined.names.get(name.partition("@")[0].lower())
        return None if card_id is None else joined.cards[card_id]

    def rules_of(self, name: str) -> CardRules:
        """What the card of a model says about the peers that may run it."""
        card = self.card(name)
        return NO_RULES if card is None or card.placement is None else card.placement.rules

    def runner_of(self, name: str) -> str:
        """Returns the module that serves a model. Raises InputError if this version serves none of the model's tasks; a
        model without a card is a text model."""
        card = self.card(name)
        return runner_of(name, ("text_generation",) if card is None else card.tasks)

    def tasks_of(self, model: ModelCard) -> tuple[str, ...]:
        """Returns what a model is for: as its card says, if the card names anything but text generation, else as its
        files show."""
        card = self.card(model.name)
        if card is not None and card.tasks != TomlCard(id="m").tasks:
            return card.tasks
        return (GENERATION,) if model.architecture == SERVED_ARCHITECTURE else model.tasks

    def allows_code(self, name: str) -> bool:
        """Whether code of the model's repository may run here: this machine's operator allows it, and a shipped card or
        a card of this machine asks for it. A peer's card is not enough."""
        card = self.card(name)
        own = card is not None and (card.id in self._own or card in shipped_cards())
        return self._allow_code and card is not None and own and card.trust_remote_code

    # changes

    async def add_card(self, card: TomlCard) -> TomlCard:
        """Stores a card in a file here and sends it to all peers; it replaces this machine's card of the same model.

        Raises InputError if the card is not acceptable, ModelError if it cannot be written.
        """
        card = replace(card, is_custom=True)
        text = card_to_toml(card)
        async with self._turn:
            await self._read_files()
            held = self._own.get(card.id)
            if held is not None and not held.is_alone:
                raise InputError(
                    f"{held.file.name} has other cards besides {card.id}: edit the file by hand", param="model"
                )
            if held is None and len(self._own) >= MAX_CARDS_PER_OWNER:
                raise InputError(
                    f"this machine has {len(self._own)} custom cards, the most that it may have; delete one first",
                    param="model",
                )
            read_card_text(text, card.id)
            file = self._directories[0] / f"{card.id.replace('/', '--')}.toml" if held is None else held.file
            if not await asyncio.to_thread(self._disk.write, file, text, f"the card of {card.id}"):
                raise ModelError(f"the card of {card.id} could not be written into {file.parent.name}")
            self._stamp = ()  # file times may be too coarse to show two writes in a row
            await self._read_files()
        return card

    async def delete_card(self, name: str) -> bool:
        """Deletes a custom card, by id or alias, on every live peer that has it; False if no peer has it.

        Raises InputError if a file must be edited by hand, and the error of a peer that cannot delete it.
        """
        card = self.card(name)
        if card is None:
            return False
        own_id, calls = self._membership.own.id, self._membership.calls
        owners = {owner for card_id, owner, _ in self._membership.view.cards() if card_id == card.id} | {own_id}
        asked = [owner for owner in owners if self._membership.is_alive(owner)]
        answers = await asyncio.gather(*(delete_card(calls, owner, card.id) for owner in asked), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return any(answer is True for answer in answers)

    def near_custom(self, name: str) -> list[str]:
        """Returns the ids and aliases of custom cards that are most similar to a name."""
        custom = [card for card in self.cards().values() if card.is_custom]
        return near_names(name, [one for card in custom for one in (card.id, *card.aliases)])

    async def delete_own(self, card_id: str) -> bool:
        """Deletes this machine's custom card of a model. Raises InputError, ModelError."""
        async with self._turn:
            held = self._own.get(card_id)
            if held is None:
                return False
            if not held.is_alone:
                raise InputError(
                    f"{held.file.name} has other cards too: remove {card_id} from it by hand", param="model"
                )
            try:
                await asyncio.to_thread(held.file.unlink, missing_ok=True)
            except OSError as exc:
                raise ModelError(f"{held.file.name} cannot be deleted: {exc.strerror}") from exc
            await self._read_files()
            return True

    async def rescan(self) -> None:
        """Reads the card files again, and publishes what has changed."""
        async with self._turn:
            await self._read_files()

    # internals

    async def _read_files(self) -> None:
        stamp = await asyncio.to_thread(_stamp, self._directories)
        if stamp == self._stamp:
            return
        found, unusable = await asyncio.to_thread(_read_directories, self._directories)
        for name in unusable.keys() - self.unusable.keys():
            _log.warning("model card file not used: %s", unusable[name])
        before, self._own, self.unusable, self._stamp = self._own, found, unusable, stamp
        for card_id in before.keys() - found.keys():
            self._membership.put_card(card_id, None)
        for card_id, held in found.items():
            if card_id not in before or before[card_id].card != held.card:
                self._membership.put_card(card_id, CardInfo(card_to_toml(held.card)))

    def _join(self) -> _Joined:
        """Merges all cards; the result is reused until a card record or a file changes."""
        view = self._membership.view
        if self._joined is not None and self._joined.version == view.cards_version and self._joined.own is self._own:
            return self._joined
        cards = {card.id: card for card in shipped_cards()}
        cards |= self._cards_of_peers(view.cards())
        cards |= {card_id: held.card for card_id, held in self._own.items()}
        names: dict[str, str] = {}
        for card in sorted(cards.values(), key=lambda card: (card.id not in self._own, not card.is_custom)):
            for alias in card.aliases:
                names.setdefault(alias.lower(), card.id)
        names |= {card_id.lower(): card_id for card_id in cards}
        self._joined = _Joined(view.cards_version, self._own, cards, names)
        return self._joined

    def _cards_of_peers(self, records: Sequence[tuple[str, str, CardInfo]]) -> dict[str, TomlCard]:
        others = [(card_id, info) for card_id, owner, info in records if owner != self._membership.own.id]
        self._of_peers = {key: self._of_peers[key] if key in self._of_peers else _of_peer(*key) for key in others}
        found: dict[str, TomlCard] = {}
        for (card_id, _), card in self._of_peers.items():
            if card is not None:
                found.setdefault(card_id, card)
        return found


def _of_peer(card_id: str, info: CardInfo) -> TomlCard | None:
    """Reads the card in a peer's record; None if it cannot be used."""
    try:
        card = read_card_text(info.toml, f"a peer's card of {card_id}")
    except MeshError as exc:
        _log.warning("model card of a peer not used: %s", one_line(str(exc)))
        return None
    return replace(card, is_custom=True) if card.id == card_id else None


def _files(directory: Path) -> list[Path]:
    try:
        found = [file for file in directory.iterdir() if file.suffix == ".toml" and file.name[0] != "."]
        return sorted(file for file in found if file.is_file())[:MAX_FILES]
    except OSError:
        return []


def _stamp(directories: Sequence[Path]) -> object:
    """Blocking. Returns a value that changes whenever a file is written, added or removed."""
    stamp = []
    for file in (file for directory in directories for file in _files(directory)):
        try:
            found = file.stat()
        except OSError:
            continue
        stamp.append((str(file), found.st_mtime_ns, found.st_size))
    return tuple(stamp)


def _read_directories(directories: Sequence[Path]) -> tuple[dict[str, _OwnCard], dict[str, str]]:
    """Blocking. Returns (cards by id, reasons of unusable files by name). Of two cards with one id the first wins."""
    found: dict[str, _OwnCard] = {}
    unusable: dict[str, str] = {}
    for file in (file for directory in directories for file in _files(directory)):
        try:
            cards = read_cards(_text_of(file), file.name)
            for card in cards:
                read_card_text(card_to_toml(card), f"{file.name}: {card.id}")
        except ModelError as exc:
            unusable[file.name] = str(exc)
            continue
        for card in cards:
            if len(found) >= MAX_CARDS_PER_OWNER:
                unusable[file.name] = (
                    f"{file.name}: the rest is not used: a machine may have {MAX_CARDS_PER_OWNER} custom cards"
                )
                break
            found.setdefault(card.id, _OwnCard(replace(card, is_custom=True), file, len(cards) == 1))
    return found, unusable


def _text_of(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ModelError(f"{file.name} is larger than the limit of {MAX_FILE_BYTES} bytes")
        return data.decode("utf-8-sig")
    except OSError as exc:
        raise ModelError(f"{file.name} cannot be read: {exc.strerror or type(exc).__name__}") from exc
    except UnicodeDecodeError as exc:
        raise ModelError(f"{file.name} is not UTF-8 (byte {exc.start})") from exc


@cache
def shipped_cards() -> tuple[TomlCard, ...]:
    """Returns all shipped cards, in the order of their files. The first call blocks for some 20 ms. Raises ModelError
    if a shipped file is invalid."""
    folder = resources.files("exo_mesh.models.cards") / "shipped"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return tuple(card for file in files for card in read_cards(file.read_text(encoding="utf-8"), file.name))
