"""Fetches what a peer wants this node to have."""

from __future__ import annotations

from collections.abc import Awaitable

from exo_mesh.base.tasks import Bound
from exo_mesh.errors import FetchError, OpenMeshError
from exo_mesh.models.cards.card_store import CardStore
from exo_mesh.models.downloads.service import Downloads
from exo_mesh.models.fetcher.wire import FILES_ONLY
from exo_mesh.models.local_files import Wants

MAX_ASKED = 32
"""Most lookups and starts of downloads that peers may run on this node at once; each may take minutes."""


class FetchesForPeers:
    """Limits what peers may have fetched here. What this node wants itself (is_own) is not limited.

    obeys_peers: this node also uses the hub when a peer asks. In an open mesh a stranger could fill its disk.
    """

    def __init__(self, downloads: Downloads, shelf: CardStore, own_name: str, *, obeys_peers: bool) -> None:
        self._downloads = downloads
        self._shelf = shelf
        self._own_name = own_name
        self._obeys_peers = obeys_peers
        self._asked = Bound(MAX_ASKED, "requests of peers to fetch models run here")

    async def introduce(self, model: str, digest: str, repo: str, revision: str, is_own: bool) -> None:
        """See Downloads.introduce and, with a repository, Downloads.resolve."""
        if is_own:
            await self._introduce(model, digest, repo, revision)
            return
        with self._asked.taken():
            if repo:
                self._require_hub(repo.removesuffix(f":{FILES_ONLY}"))
            await _with_remedy(self._introduce(model, digest, repo, revision))

    async def _introduce(self, model: str, digest: str, repo: str, revision: str) -> None:
        if repo:
            await self._downloads.resolve(model, repo, revision, allows_code=self._shelf.allows_code(model))
        else:
            await self._downloads.introduce(model, digest)

    def _require_hub(self, repo: str) -> None:
        """Raises OpenMeshError in a mesh where peers have no right to make this node use the hub."""
        if not self._obeys_peers:
            raise OpenMeshError(
                f"this mesh is open, so {self._own_name} downloads {repo} from the hub for no peer; "
                f"type `exo-mesh pull {repo}` on that machine, or start its node with --open-admin"
            )

    async def pull(self, model: str, digest: str, wants: Wants, hub_user: str, is_own: bool) -> None:
        """See Downloads.pull."""
        if is_own:
            await self._downloads.pull(model, digest, wants, hub_user=hub_user)
            return
        with self._asked.taken():
            await _with_remedy(
                self._downloads.pull(model, digest, wants, from_hub=self._obeys_peers, hub_user=hub_user)
            )


async def _with_remedy(work: Awaitable[None]) -> None:
    """Awaits the work; puts the remedy of a FetchError into its text, because only the text reaches a peer."""
    try:
        await work
    except FetchError as exc:
        raise FetchError(exc.full) from exc
