"""The services of a node that its HTTP API calls, one for each subject."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from exo_mesh.mesh.membership.service import Membership
from exo_mesh.models.parts import ModelParts
from exo_mesh.node.inspection.service import InspectionService
from exo_mesh.node.instance_desk import InstanceService
from exo_mesh.node.model_desk import ModelService
from exo_mesh.node.observation import Observation
from exo_mesh.node.request_service import RequestService
from exo_mesh.node.store_desk import StoreDesk
from exo_mesh.rings.hosting.parts import HostingParts
from exo_mesh.rings.hosting.peer_desk import PeerService
from exo_mesh.rings.placing.parts import InstanceParts
from exo_mesh.rings.serving.parts import ServingParts


@dataclass(frozen=True, slots=True)
class Services:
    """All failures of a call are MeshErrors; every await has a deadline."""

    models: ModelService
    instances: InstanceService
    requests: RequestService
    peers: PeerService
    store: StoreDesk
    observation: Observation
    inspection: InspectionService

    @staticmethod
    def at(
        membership: Membership,
        models: ModelParts,
        hosting: HostingParts,
        owning: InstanceParts,
        serving: ServingParts,
        observation: Observation,
        phase: Callable[[], str],
        *,
        obeys_peers: bool,
    ) -> Services:
        """phase: see Health.describe. obeys_peers: see ModelService."""
        model_service = ModelService(membership, models, owning, obeys_peers=obeys_peers)
        return Services(
            model_service,
            InstanceService(membership, models, owning),
            RequestService(membership, hosting.host, serving, phase),
            PeerService(membership, hosting.host, hosting.runner_history.guard),
            StoreDesk(membership, models.catalogue, models.downloads.store, model_service),
            observation,
            observation.inspection,
        )
