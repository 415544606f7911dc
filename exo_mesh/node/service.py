"""What the HTTP API and the command line may ask of a node. `node.Node` is the one implementation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from exo_mesh.domain.download import DownloadEntry
from exo_mesh.domain.request import GenerateRequest, RequestEvent
from exo_mesh.fetcher.wire import HubModel
from exo_mesh.hosting.peer_desk import PeerDesk
from exo_mesh.inspection.service import InspectionService
from exo_mesh.instances.spec import InstanceSpec
from exo_mesh.membership.sleeping import SleepDesk
from exo_mesh.membership.stopping import StopDesk
from exo_mesh.models.cards.profile import CapabilityProfile
from exo_mesh.models.cards.toml_card import TomlCard
from exo_mesh.serving.streams import StreamService


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that some live peer has on disk, or parts of it. context_length is the checkpoint's own.

    instance_ids: the instances that are ready. is_loading: another instance is starting, or recovers from a loss.
    aliases: other names that its card gives it. profile: what it can do, as far as that is known.
    num_bytes: of all weights. quantization: of them, "" if nobody says. dtype: of the activations.
    """

    name: str
    peers: tuple[str, ...]
    instance_ids: tuple[str, ...]
    context_length: int
    eos_ids: tuple[int, ...]
    is_loading: bool = False
    aliases: tuple[str, ...] = ()
    profile: CapabilityProfile | None = None
    num_bytes: int = 0
    num_layers: int = 0
    quantization: str = ""
    dtype: str = ""


class MeshObservation(Protocol):
    """What a node says of itself and of the mesh; nothing here changes anything."""

    def state(self) -> dict[str, Any]:
        """`view` (agreed: peers, instances, view_digest), `telemetry` (per peer) and `health`."""

    async def view_change(self, timeout_s: float) -> bool:
        """True when a peer or an instance has come, gone or changed its state; False after timeout_s without that."""

    def topology(self) -> dict[str, Any]:
        """Peers, links, and the ring of each instance, for people and pictures."""

    def drain_state(self) -> dict[str, Any]:
        """{"draining", "drained", "requests", "sequences"}: what entered here and what its stages hold."""

    def queue(self) -> dict[str, Any]:
        """{"depth", "max", "waiting", "in_progress", "entered", "instances": [...]} of the drivers here."""

    def recent_requests(self, most: int, key_id: str | None = None) -> list[dict[str, Any]]:
        """How requests that entered here have ended, newest first. key_id: only those that came with this API key, ""
        for those without one; None for all of them."""

    def request_stats(self) -> dict[str, Any]:
        """Sums over the requests that entered here."""

    def identity(self) -> dict[str, Any]:
        """{"node_id", "name", "incarnation", "version", "protocol", "namespace", "api_url"} of this node."""

    def runner(self) -> dict[str, str]:
        """{"runner_mode": "subprocess", "runner_status"}; the status of the stages here: "none" without one, "loading",
        "idle", or "busy" while one of them holds a sequence."""

    def idle_instances(self) -> list[str]:
        """Instances that have failed, or that no request waits for or runs on, as far as is known here."""

    def memory(self, *, whole_mesh: bool) -> dict[str, Any]:
        """Memory of this machine and of the stages here; with whole_mesh the last reading of every peer, too."""

    def memory_live(self) -> list[dict[str, float]]:
        """The last readings of this machine's memory, oldest first."""

    def health(self) -> dict[str, Any]:
        """{"status": "ok" | "degraded" | "starting" | "stopping" | …, "level", "reasons": [{"code", "level", "message",
        "remedy"}], "peer_health": [{"id", "name", "level", "reasons"}], "instance_health": likewise, …}"""


class StoreService(Protocol):
    """The model store of the mesh. All raise NotReadyError, but for `health`, while its host is away."""

    def health(self) -> dict[str, Any]:
        """{"status": "ok" | "unreachable", "host": {"id", "name"}, "is_here", "models", "room_bytes", "hub_fallback",
        "keep_recent_bytes"}; keep_recent_bytes: None if idle staged copies are not deleted here."""

    def registry(self) -> list[dict[str, Any]]:
        """[{"id", "object", "whole", "bytes", "staged_at": ids of peers}]: the models of the host."""

    def downloads(self, model: str = "") -> list[DownloadEntry]:
        """What the host fetches, or has fetched or failed to fetch of late; of one model, if it is named."""

    async def start(self, model: str) -> list[DownloadEntry]:
        """Let the host fetch all files of a model. Raises as MeshService.start_download."""

    async def delete(self, model: str) -> bool:
        """Delete a model of the store; peers delete their staged copies when they hear of it. False if the store does
        not have the model. Raises InputError if an instance uses it."""

    async def purge(self, peers: Sequence[str]) -> list[str]:
        """Delete all staged copies that nothing uses, everywhere or on these peers; answers the peers that had any."""


class MeshService(Protocol):
    """All failures are MeshErrors; every await has a deadline inside."""

    @property
    def observation(self) -> MeshObservation:
        """Everything that only looks."""

    @property
    def inspection(self) -> InspectionService:
        """For those who look for what goes wrong: diagnostics, traces, captures."""

    def models(self) -> list[ModelEntry]:
        """Every model that a live peer has on disk, sorted by name."""

    def known_cards(self) -> list[TomlCard]:
        """What cards say of models that no live peer has, sorted by id."""

    async def model(self, name: str) -> ModelEntry:
        """One of them, by hub id or alias. Raises UnknownModelError, with near names if there are any, and ModelError
        if only this node has it and cannot use it."""

    async def find_model(self, name: str, *, may_download: bool) -> ModelEntry:
        """As `model`; config, tokenizer and headers of one that no peer has are fetched from the hub, if the caller may
        cause a download. Raises FetchError and InputError as well, and NotFetchedError if the caller may not."""

    def downloads(self) -> list[DownloadEntry]:
        """What all peers fetch, or have fetched or failed to fetch of late, by model and peer."""

    async def start_download(
        self, model: str, *, peers: Sequence[str] = (), whole: bool = False
    ) -> list[DownloadEntry]:
        """Let peers (by id or name) fetch a model without placing it, and keep it: by default each peer's share of the
        plan that a request would make; with `whole` all files, on this peer unless others are named. Answers what has
        begun, as far as the mesh knows by then. Raises PlacementError with the arithmetic, and FetchError."""

    async def cancel_download(self, peer_id: str, model: str) -> bool:
        """End a download, or forget one that has failed; what came is kept. False if there is none."""

    async def delete_model(self, name: str, *, peers: Sequence[str] = ()) -> dict[str, int]:
        """Delete what was fetched of a model, everywhere or on these peers; answers the ids of those that did. Raises
        InputError if an instance uses it."""

    async def search_models(self, query: str, limit: int) -> list[HubModel]:
        """Models of the hub. Raises FetchError."""

    async def add_card(self, repo: str) -> ModelEntry:
        """Make a card from the config and the headers of a hub repository, for all peers."""

    async def delete_card(self, name: str) -> bool:
        """Delete a card that add_card has made, at all peers; False if there is none."""

    @property
    def store(self) -> StoreService | None:
        """The model store; None while there is none."""

    async def storage(self) -> dict[str, Any]:
        """{"path", "total_bytes", "free_bytes", "floor_bytes", "max_bytes", "used_bytes", "models": [{"name", "bytes",
        "whole", "pinned", "staged", "used_at", "in_use"}]} of the models that this node has fetched."""

    async def model_at(self, path: Path) -> str:
        """The name of the model in a directory of this machine, which must be one that the node lists. Raises
        UnknownModelError."""

    def unusable_models(self) -> dict[str, str]:
        """Models on this machine that cannot be used, and why, by name."""

    async def text_files(self, name: str) -> Path:
        """A local directory with the model's tokenizer.json, tokenizer_config.json, chat template and configs;
        fetched from a peer if this one does not have the model."""

    async def context_limit(self, name: str) -> int:
        """Most tokens of prompt + output that a request for this model may have, as placed or as it would be."""

    @property
    def streams(self) -> StreamService:
        """What runs now, for others than the client that asked."""

    def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        """Run a request on an instance of the model, placing one if there is none. Closing the iterator cancels it.

        Raises MeshErrors at any point; ends after the event whose `finish` is set.
        """

    async def cancel(self, request_id: str, key_id: str | None = None) -> bool:
        """Cancel a request that entered at any peer this node can reach, by any id that its client saw; False if nobody
        knows it. With a key_id, a
        request that came with another API key is one that nobody knows."""

    async def create_instance(self, spec: InstanceSpec) -> dict[str, Any]:
        """Place a model now and wait until it is ready; answers the instance as in `state()["view"]["instances"]`."""

    async def create_replicas(self, spec: InstanceSpec, count: int) -> list[dict[str, Any]]:
        """As create_instance, so many times, on peers of their own; instances that there are already count. If one
        cannot be placed the ones before it stay."""

    async def preview_instances(self, spec: InstanceSpec) -> list[dict[str, Any]]:
        """Every sensible way to place a model now, with the arithmetic per peer, or why it is not possible."""

    async def preview_instance(self, spec: InstanceSpec) -> dict[str, Any]:
        """What create_instance would place now, with the arithmetic per peer. Raises PlacementError."""

    async def delete_instance(self, instance_id: str) -> bool:
        """Stop an instance everywhere; False if it is unknown."""

    @property
    def stops(self) -> StopDesk:
        """Stops and restarts nodes."""

    @property
    def sleeps(self) -> SleepDesk:
        """Lets this machine sleep, and wakes peers."""

    @property
    def peer_desk(self) -> PeerDesk:
        """Drains any peer and reads its log."""

    def drain(self, *, on: bool) -> None:
        """Finish what there is and take nothing new; or take requests again."""

    def lift_quarantine(self) -> int:
        """Models and engines that were not tried here for a while may be tried again; answers how many there were."""
