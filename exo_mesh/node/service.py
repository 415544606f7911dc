"""The services of a node that its HTTP API calls, one for each subject."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.wiring import ModelParts
from exo_mesh.node.inspection.service import InspectionService
from exo_mesh.node.instance_service import InstanceService
from exo_mesh.node.model_service import ModelService
from exo_mesh.node.observation import Observation
from exo_mesh.node.request_service import RequestService
from exo_mesh.node.store_service import StoreService
from exo_mesh.rings.hosting.peer_service import PeerService
from exo_mesh.rings.hosting.wiring import HostingParts
from exo_mesh.rings.placing.wiring import InstanceParts
from exo_mesh.rings.serving.wiring import ServingParts


class Services(msgspec.Struct, frozen=True):
    """All failures of a call are MeshErrors; every await has a deadline."""

    models: ModelService
    instances: InstanceService
    requests: RequestService
    peers: PeerService
    store: StoreService
    observation: Observation
    inspection: InspectionService

    @staticmethod
    def build(
        membership: Membership,
        models: ModelParts,
        hosting: HostingParts,
        owning: InstanceParts,
        serving: ServingParts,
        observation: Observation,
        phase: Callable[[], str],
        *,
        obeys_peers: bool,
        engines_for: Callable[[str], tuple[str, ...]],
    ) -> Services:
        """phase: see Health.describe. obeys_peers, engines_for: see ModelService."""
        model_service = ModelService(membership, models, owning, obeys_peers=obeys_peers, engines_for=engines_for)
        return Services(
            model_service,
            InstanceService(membership, models, owning),
            RequestService(membership, hosting.host, serving, phase),
            PeerService(membership, hosting.host, hosting.runner_history.guard),
            StoreService(membership, models.catalogue, models.downloads.store, model_service),
            observation,
            observation.inspection,
        )
