"""What a node of a closed mesh makes of the secret at its start."""

from __future__ import annotations

import datetime

from exo_mesh.config import Settings
from exo_mesh.node import this_machine
from exo_mesh.security.credentials import Credentials


def own_credentials(settings: Settings) -> Credentials | None:
    """A new certificate for this start of the node; None in an open mesh."""
    if not settings.secret:
        return None
    from exo_mesh.security.certificates import issue  # an open mesh does without cryptography, which imports slowly

    hosts = [address.rpartition(":")[0] for address in this_machine.addresses(settings.host, 0)]
    return issue(settings.secret, settings.name, hosts, datetime.datetime.now(datetime.UTC))
