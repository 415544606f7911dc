"""Resolves a model's name: a model here or on a peer, an alias of a card, or a hub repository. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping

import msgspec

from exo_mesh.base.printable import quoted
from exo_mesh.errors import UnknownModelError
from exo_mesh.weights.gguf_table import without_shard
from exo_mesh.weights.names import MAX_NAME, PART

NUM_NEAR = 3

_HUB_PREFIX = re.compile(r"(?:https://)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_GIVEN = re.compile(rf"(?P<base>{PART}(?:/{PART})?)(?:@(?P<revision>{PART}))?(?::(?P<tag>{PART}))?", re.ASCII)
_QUANT = re.compile(r"(?:UD-)?(?:I?Q[1-8]|TQ[12]|BF16|FP?16|FP?32|MXFP4)(?:_[A-Z0-9]+)*", re.IGNORECASE)
"""Names of quantisations in GGUF files: Q4_K_M, IQ2_XXS, UD-Q4_K_XL, F16."""


class ModelReference(msgspec.Struct, frozen=True):
    """The model that a name refers to.

    name: the model's name in the mesh: `org/name`, `org/name@revision`, or the name of a directory. repo: its hub id,
    "" if the name is not one. revision: a branch, tag or commit, "" for main. quant: which files of a GGUF repository,
    such as Q4_K_M; "" if the name does not say.
    """

    name: str
    repo: str = ""
    revision: str = ""
    quant: str = ""

    @property
    def in_mesh(self) -> str:
        """The name in the mesh, also of one quantisation: the name of its directory."""
        return f"{self.name}-{self.quant}" if self.quant else self.name


class KnownNames(msgspec.Struct, frozen=True):
    """The names that a node knows. cards: the id of the card by its id and each alias, in lower case.

    An exact name refers to a model on this machine, else on a peer, else of a card. So a name that no machine uses for
    a directory means the same model everywhere. Only if no exact name fits may case and organisation differ.
    """

    local: Collection[str] = ()
    peers: Collection[str] = ()
    cards: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def every(self) -> list[str]:
        """All known names, each once; for cards, their ids as written and their aliases."""
        return list(dict.fromkeys([*self.local, *self.peers, *self.cards.values(), *self.cards]))


def find_reference(text: str, known: KnownNames) -> ModelReference:
    """Resolves a name. An unknown name refers to itself, because the hub may have it; some of the hub's oldest models,
    such as gpt2, have ids without an organisation.

    Raises UnknownModelError, with the most similar names, if the text has not the form of a name.
    """
    given, parts = _parsed(text)
    for name in dict.fromkeys((given, without_shard(given))):  # people name the file, too
        if name in known.local or name in known.peers:
            return _reference(name)
    if parts is None:
        raise unknown_model(text, known)
    base, revision, tag = parts["base"], parts["revision"] or "", parts["tag"] or ""
    if tag and (card := known.cards.get(f"{base}:{tag}".lower())):
        base, tag = card, ""
    quant = tag.upper() if _QUANT.fullmatch(tag) else ""
    if tag and not quant and tag.lower() != "latest":
        raise unknown_model(text, known)
    if quant and (of_quant := _known_quant(f"{base}@{revision}" if revision else base, quant, known)):
        return _reference(of_quant)
    found = known.cards.get(base.lower()) or _same_name(text, base, known)
    return ModelReference(*_named(base, revision), quant) if found is None else _reference(found, revision, quant)


def is_name(text: str) -> bool:
    """Whether a text has the form of a model name, known or not."""
    return _parsed(text)[1] is not None


def unknown_model(text: str, known: KnownNames) -> UnknownModelError:
    """Returns the error for an unknown name, with the most similar known names."""
    near = near_names(text, known.every)
    hint = f"; near: {', '.join(near)}" if near else ""
    return UnknownModelError(f"no peer has a model {quoted(text, MAX_NAME)}{hint}", param="model")


def near_names(wanted: str, known: Iterable[str], most: int = NUM_NEAR) -> list[str]:
    """Returns the known names that are most similar to `wanted`, with or without their organisation, best first."""
    by_text: dict[str, str] = {}
    for name in known:
        for text in (name.lower(), name.rpartition("/")[2].lower()):
            by_text.setdefault(text, name)
    texts = difflib.get_close_matches(wanted[:MAX_NAME].lower(), by_text, n=4 * most, cutoff=0.4)
    return list(dict.fromkeys(by_text[text] for text in texts))[:most]


def _parsed(text: str) -> tuple[str, re.Match[str] | None]:
    """Returns (the name without the hub's address, its parts); the parts are None if the text is not a name."""
    if len(text) > 2 * MAX_NAME:  # with the hub's address and white space
        return text, None
    given = _HUB_PREFIX.sub("", text.strip(), count=1)
    return given, _GIVEN.fullmatch(given) if len(given) <= MAX_NAME else None


def _same_name(text: str, base: str, known: KnownNames) -> str | None:
    """Returns the only known name that differs at most in case and in a missing organisation; else a hub id with its
    organisation itself.

    Raises UnknownModelError if there are several such names.
    """
    is_bare = "/" not in base
    for names in (known.local, known.peers, set(known.cards.values())):
        same = {name for name in names if name.lower() == base.lower()}
        if not same and is_bare:
            same = {name for name in names if name.partition("@")[0].rpartition("/")[2].lower() == base.lower()}
        if len(same) > 1:
            several = ", ".join(sorted(same)[:NUM_NEAR])
            raise UnknownModelError(f"{quoted(text, MAX_NAME)} may be one of several models: {several}", param="model")
        if same:
            return same.pop()
    return None if is_bare else base


def _known_quant(base: str, quant: str, known: KnownNames) -> str | None:
    """Returns the known name of one quantisation of a GGUF model, which may differ in case."""
    wanted = {f"{base}{sign}{quant}".lower() for sign in "-."}
    return next((name for names in (known.local, known.peers) for name in names if name.lower() in wanted), None)


def _reference(name: str, revision: str = "", quant: str = "") -> ModelReference:
    """Makes the reference to a model by its full name, which may contain a revision."""
    name, repo, revision = _named(name, revision)
    return ModelReference(name, repo if "/" in repo else "", revision, quant)


def _named(name: str, revision: str) -> tuple[str, str, str]:
    """(name in the mesh, name without a revision, revision that is not main)."""
    repo, _, of_name = name.partition("@")
    revision = revision or of_name
    revision = "" if revision == "main" else revision
    return f"{repo}@{revision}" if revision else repo, repo, revision
