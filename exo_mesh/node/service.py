"""The interface of a node for the HTTP API and the command line. `node.Node` implements it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Protocol

from exo_mesh.domain.download import DownloadEntry
from exo_mesh.domain.request import GenerateRequest, RequestEvent
from exo_mesh.mesh.membership.sleeping import SleepDesk
from exo_mesh.mesh.membership.stopping import StopDesk
from exo_mesh.models.cards.toml_card import TomlCard
from exo_mesh.models.entry import ModelEntry
from exo_mesh.models.fetcher.wire import HubModel
from exo_mesh.node.inspection.service import InspectionService
from exo_mesh.rings.hosting.peer_desk import PeerDesk
from exo_mesh.rings.placing.spec import InstanceSpec
from exo_mesh.rings.serving.explanations import Explanation
from exo_mesh.rings.serving.kept_answers import KeptService
from exo_mesh.rings.serving.streams import StreamService
from exo_mesh.text.template import ChatTemplate


class MeshObservation(Protocol):
    """Reports the state of the node and of the mesh. Read-only."""

    def state(self) -> dict[str, Any]:
        """`view` (shared by all peers: peers, instances, view_digest), `telemetry` (per peer) and `health`."""

    async def view_change(self, timeout_s: float) -> bool:
        """Waits until a peer or instance appears, disappears or changes its state: True; False after timeout_s."""

    def topology(self) -> dict[str, Any]:
        """The peers, the links, and the ring of each instance, for people and pictures."""

    def drain_state(self) -> dict[str, Any]:
        """{"draining", "drained", "requests", "sequences"}: requests that entered here, sequences of the stages
        here."""

    def queue(self) -> dict[str, Any]:
        """{"depth", "max", "waiting", "in_progress", "entered", "instances": [...]} of the drivers here."""

    def recent_requests(self, most: int, key_id: str | None = None) -> list[dict[str, Any]]:
        """The outcomes of requests that entered here, newest first. key_id: only requests with this API key, "" for
        requests without a key, None for all."""

    def explanation(self, request_id: str, key_id: str | None = None) -> Explanation | None:
        """Where the prompt of a request that entered here parted from what its ring kept; None if that is not known.
        key_id: as for recent_requests."""

    def request_stats(self) -> dict[str, Any]:
        """Statistics of the requests that entered here."""

    def identity(self) -> dict[str, Any]:
        """{"node_id", "name", "incarnation", "version", "protocol", "namespace", "api_url"} of this node."""

    def runner(self) -> dict[str, str]:
        """{"runner_mode": "subprocess", "runner_status"}; runner_status: "none" without a stage here, "loading",
        "idle", "busy" while a stage holds a sequence, "failed" if nothing runs here and an instance with a stage here
        failed, or "shutting_down" while the node stops."""

    def idle_instances(self) -> list[str]:
        """Ids of instances that failed, or that no request uses or waits for, as far as this node knows."""

    def memory(self, *, whole_mesh: bool) -> dict[str, Any]:
        """The memory of this machine and of the stages here; with whole_mesh also the last reading of every peer."""

    def memory_live(self) -> list[dict[str, float]]:
        """The last readings of this machine's memory, oldest first."""

    def health(self) -> dict[str, Any]:
        """{"status": "ok" | "degraded" | "starting" | "stopping" | …, "level", "reasons": [{"code", "level", "message",
        "remedy"}], "peer_health": [{"id", "name", "level", "reasons"}], "instance_health": likewise, …}"""


class StoreService(Protocol):
    """The model store of the mesh. All calls except `health` raise NotReadyError while its host is not in the mesh."""

    def health(self) -> dict[str, Any]:
        """{"status": "ok" | "unreachable", "host": {"id", "name"}, "is_here", "models", "room_bytes", "hub_fallback",
        "keep_recent_bytes"}; keep_recent_bytes: None if this node does not delete idle staged copies."""

    def registry(self) -> list[dict[str, Any]]:
        """The models of the host: [{"id", "object", "whole", "bytes", "staged_at": ids of peers}]."""

    def downloads(self, model: str = "") -> list[DownloadEntry]:
        """The current and recently ended downloads of the host; of one model, if it is named."""

    async def start(self, model: str) -> list[DownloadEntry]:
        """Lets the host download all files of a model. Raises as MeshService.start_download."""

    async def delete(self, model: str) -> bool:
        """Deletes a model from the store; peers then delete their staged copies, too. False if the store does not have
        the model. Raises InputError if an instance uses it."""

    async def purge(self, peers: Sequence[str]) -> list[str]:
        """Deletes all unused staged copies, everywhere or on these peers; returns the ids of peers that had any."""


class MeshService(Protocol):
    """All calls to a node. All failures are MeshErrors; every await has a deadline."""

    @property
    def observation(self) -> MeshObservation:
        """The read-only calls."""

    @property
    def inspection(self) -> InspectionService:
        """The calls for troubleshooting: diagnostics, traces, captures."""

    def models(self) -> list[ModelEntry]:
        """Every model that a live peer has on disk, sorted by name."""

    def known_cards(self) -> list[TomlCard]:
        """The cards of models that no live peer has, sorted by id."""

    async def model(self, name: str) -> ModelEntry:
        """A model on a live peer's disk, by hub id or alias. Raises UnknownModelError with similar names, and
        ModelError if only this node has the model and cannot use it."""

    async def find_model(self, name: str, *, may_download: bool) -> ModelEntry:
        """Like `model`, but downloads config, tokenizer and headers from the hub if no peer has the model.

        Also raises FetchError and InputError, and NotFetchedError where may_download is False."""

    def downloads(self) -> list[DownloadEntry]:
        """The current and recently ended downloads of all peers, by model and peer."""

    async def start_download(
        self, model: str, *, peers: Sequence[str] = (), whole: bool = False
    ) -> list[DownloadEntry]:
        """Starts downloads of a model without placing it, and pins the files.

        peers: see Membership.peer_named. By default each peer gets its layers of the plan that a request would make;
        with `whole` the named peers, or else this one, get all files. Returns the downloads that this node knows to
        have started. Raises PlacementError with the arithmetic, and FetchError.
        """

    async def cancel_download(self, peer: str, model: str) -> bool:
        """Cancels a download at a peer (see Membership.peer_named), or forgets a failed one; keeps the downloaded part.
        False if there is none."""

    async def delete_model(self, name: str, *, peers: Sequence[str] = ()) -> dict[str, int]:
        """Deletes the downloaded files of a model, everywhere or on these peers; returns the freed bytes by peer id.
        Raises InputError if an instance uses the model."""

    async def search_models(self, query: str, limit: int) -> list[HubModel]:
        """Searches the hub for models. Raises FetchError."""

    async def add_card(self, repo: str) -> ModelEntry:
        """Makes a card from the config and headers of a hub repository, for all peers."""

    async def delete_card(self, name: str) -> bool:
        """Deletes a card that add_card made, at all peers; False if there is none."""

    @property
    def store(self) -> StoreService | None:
        """The model store; None if none is configured."""

    async def storage(self) -> dict[str, Any]:
        """The disk use of the models that this node downloaded: {"path", "total_bytes", "free_bytes", "floor_bytes",
        "max_bytes", "used_bytes", "models": [{"name", "bytes", "whole", "pinned", "staged", "used_at", "in_use"}]}."""

    async def model_at(self, path: Path) -> str:
        """The name of the model in a directory of this machine. Raises UnknownModelError if the node does not list
        it."""

    def unusable_models(self) -> dict[str, str]:
        """The models on this machine that cannot be used: reason by name."""

    def is_reading_models(self) -> bool:
        """Whether this node still reads its disk, so that models may be missing in the lists."""

    async def text_files(self, name: str) -> Path:
        """A local directory with the model's tokenizer.json, tokenizer_config.json, chat template and configs, copied
        from a peer if this one does not have the model."""

    def note_template(self, name: str, template: ChatTemplate) -> None:
        """Takes what a renderer has found about a model's chat template, for the list of models."""

    async def context_limit(self, name: str) -> int:
        """Most tokens of prompt + output of a request for this model, as it is placed or would be placed."""

    @property
    def streams(self) -> StreamService:
        """The running requests, for callers other than the client of the request."""

    @property
    def kept_answers(self) -> KeptService:
        """The finished answers that later requests may refer to."""

    def generate(self, model: str, request: GenerateRequest) -> AsyncGenerator[RequestEvent, None]:
        """Runs a request on an instance of the model, and places an instance if there is none.

        Raises MeshErrors at any point; ends after the event whose `finish` is set. Closing the iterator cancels the
        request.
        """

    async def cancel(self, request_id: str, key_id: str | None = None) -> bool:
        """Cancels a request at any reachable peer, by any id that its client saw; False if it is unknown. With a
        key_id, a request with another API key counts as unknown."""

    async def create_instance(self, spec: InstanceSpec) -> dict[str, Any]:
        """Places a model and waits until it is ready; returns the instance as in `state()["view"]["instances"]`."""

    async def create_replicas(self, spec: InstanceSpec, count: int) -> list[dict[str, Any]]:
        """Calls create_instance `count` times on disjoint peers; existing instances count. If one cannot be placed,
        those before it stay."""

    async def preview_instances(self, spec: InstanceSpec) -> list[dict[str, Any]]:
        """Every sensible placement of a model now, with the arithmetic per peer, or the reason why it is not
        possible."""

    async def preview_instance(self, spec: InstanceSpec) -> dict[str, Any]:
        """The placement that create_instance would make now, with the arithmetic per peer. Raises PlacementError."""

    async def delete_instance(self, instance_id: str) -> bool:
        """Stops an instance on all peers; False if it is unknown."""

    def keep_loaded(self, instance_id: str, idle_s: float) -> None:
        """Sets how long an instance may be unused before it is unloaded; negative: for ever; 0: as soon as its requests
        have ended. Returns at once."""

    def idle_left_s(self, instance_id: str) -> float | None:
        """Seconds until an instance is unloaded if nobody uses it; None: never. For an instance that another peer owns,
        the time that this node's setting allows."""

    @property
    def stops(self) -> StopDesk:
        """Stops and restarts nodes."""

    @property
    def sleeps(self) -> SleepDesk:
        """Reports that this machine sleeps, and wakes peers."""

    @property
    def peer_desk(self) -> PeerDesk:
        """Drains any peer and reads its log."""

    def drain(self, *, on: bool) -> None:
        """Drains this node: it finishes its requests and accepts no new ones. on=False: it accepts requests again."""

    def lift_quarantine(self) -> int:
        """Ends the quarantine of models and engines that failed here repeatedly; returns how many there were."""
