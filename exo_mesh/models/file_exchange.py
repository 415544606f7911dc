"""Exchanges model files with peers: the node's file server and its fetcher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from exo_mesh.base.printable import reason_of
from exo_mesh.base.tasks import TaskOwner
from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.errors import ModelError, UnknownModelError
from exo_mesh.models.catalogue import Catalogue
from exo_mesh.models.fetcher.wire import Tls
from exo_mesh.models.fetching import Fetcher
from exo_mesh.models.file_server.server import FileServer
from exo_mesh.models.hub_token import FILE_NAME, HubToken
from exo_mesh.models.local_files import gguf_dir
from exo_mesh.security.credentials import Credentials, CredentialSource
from exo_mesh.settings.config import Settings

PACE_EVERY_S = 0.5

_log = logging.getLogger(__name__)


class FileExchange:
    """Serves the models that are here, and fetches others; both slow down while streams run on this machine."""

    def __init__(
        self,
        settings: Settings,
        catalogue: Catalogue,
        credentials: CredentialSource | None,
        floor_bytes: int,
        root: Path,
    ) -> None:
        """root: the directory of the fetched models."""
        self._catalogue = catalogue
        self._root = root
        self._credentials = credentials
        self._host = settings.host
        first, last = settings.data_ports or (0, 0)
        # runners take their ports from the other end of the range; a single port is for a runner
        self._ports = range(last, first, -1) or range(1)
        self._is_busy = False
        self._tasks = TaskOwner()
        tls = None if credentials is None else _tls_of(credentials.current)
        self._fetcher = Fetcher(self._tasks, is_offline=settings.offline, floor_bytes=floor_bytes, tls=tls)
        self.hub_token = HubToken(settings.home / FILE_NAME, self._fetcher.authorize)
        self._server = FileServer(self._find, credentials, is_busy=lambda: self._is_busy)
        self.port = 0

    @property
    def fetcher(self) -> Fetcher:
        return self._fetcher

    @property
    def ended_tasks(self) -> Mapping[str, str]:
        """Long-lived tasks that a bug has ended; see TaskOwner."""
        return self._tasks.ended

    async def start(self, is_busy: Callable[[], bool]) -> None:
        """Starts serving on `port`, one of --data-ports if there are several; `port` is 0 if that fails. is_busy:
        whether streams run here."""
        failure = ""
        for port in self._ports:
            try:
                self.port = await asyncio.to_thread(self._server.start, self._host, port)
                break
            except (OSError, ValueError) as exc:
                failure = reason_of(exc)
        else:
            _log.warning("the file server did not start, so peers cannot copy models from this node: %s", failure)
        self._tasks.keep(lambda: self._keep_pace(is_busy), "pace of copies")

    async def stop(self) -> None:
        await asyncio.gather(self._fetcher.close(), asyncio.to_thread(self._server.stop))
        await self._tasks.close()

    def renew(self) -> None:
        """Uses the node's renewed credentials."""
        assert self._credentials is not None, "an open mesh has none"
        self._fetcher.renew(_tls_of(self._credentials.current))

    async def _keep_pace(self, is_busy: Callable[[], bool]) -> None:
        while True:
            self._is_busy = is_busy()
            self._fetcher.pace(is_busy=self._is_busy)
            await next_wakeup(PACE_EVERY_S)

    def _find(self, name: str) -> tuple[Path, str] | None:
        """Returns directory and digest of a model, for the file server's threads; GGUF files have no digest."""
        try:
            return self._catalogue.local_dir(name), self._catalogue.local_card(name).digest
        except (UnknownModelError, ModelError):
            model_dir = gguf_dir(self._root, name)
            return None if model_dir is None else (model_dir, "")


def _tls_of(credentials: Credentials) -> Tls:
    return Tls(credentials.authority.decode(), credentials.certificate.decode(), credentials.private_key.decode())
