"""Issues this node's certificate from the mesh secret and renews it before it expires."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable

from exo_mesh.base.wakeups import next_wakeup
from exo_mesh.machine import this_machine
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.hosting.stage_host import StageHost
from exo_mesh.security.credentials import Credentials, RenewedCredentials
from exo_mesh.settings.config import Settings

LOOK_EVERY_S = 60.0
"""Seconds between checks. A certificate is renewed months before it expires, but a clock that has just been set may
make it old at once."""

Now = Callable[[], datetime.datetime]

_log = logging.getLogger(__name__)


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def own_credentials(settings: Settings) -> RenewedCredentials | None:
    """Credentials with a new certificate for this start of the node; None in an open mesh."""
    return RenewedCredentials(_issued(settings, utc_now())) if settings.secret else None


def _issued(settings: Settings, now: datetime.datetime) -> Credentials:
    from exo_mesh.security.certificates import issue  # an open mesh needs no cryptography, which imports slowly

    hosts = [address.rpartition(":")[0] for address in this_machine.addresses(settings.host, 0)]
    return issue(settings.secret, settings.name, hosts, now)


class Renewal:
    """Keeps the certificate of a node, and of its runners, valid. Open connections stay as they are."""

    def __init__(
        self,
        settings: Settings,
        own: RenewedCredentials,
        membership: Membership,
        host: StageHost,
        renew_files: Callable[[], None] = lambda: None,
        now: Now = utc_now,
    ) -> None:
        self._settings = settings
        self._own = own
        self._membership = membership
        self._host = host
        self._renew_files = renew_files
        self._now = now

    async def keep(self) -> None:
        """Renew the certificate whenever it is due, until cancelled."""
        while True:
            await next_wakeup(LOOK_EVERY_S)
            await self.renew_if_due()

    async def renew_if_due(self) -> bool:
        """Renew the certificate if it is due; returns whether it was."""
        from exo_mesh.security.certificates import is_due

        now = self._now()
        if not is_due(self._own.current, now):
            return False
        await self.renew(now)
        return True

    async def renew(self, now: datetime.datetime) -> None:
        """Use a new certificate for all connections from now on."""
        self._own.replace(_issued(self._settings, now))
        for peer in self._membership.peers:  # a channel dials with the credentials it was opened with, also years later
            peer.use(peer.client.at(peer.client.address))
        self._renew_files()
        await self._host.show_new_certificate()
        _log.info("renewed the certificate of this node")
