"""What a node tells its runners, as values; runner.proto explains the fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from exo_mesh.domain.plan import Plan
from exo_mesh.domain.tensor_group import RankWiring
from exo_mesh.domain.whole.served import ServedModel
from exo_mesh.security.credentials import Credentials


class Prepare(msgspec.Struct, frozen=True):
    """As the first message, before any StartStage: import the library of this engine, and wait."""

    engine: str


@dataclass(frozen=True, slots=True)
class PrefixDisk:
    """Where a stage writes KV of ended requests for later ones. secret: seals the files; empty in an open mesh."""

    directory: str
    most_bytes: int
    days: float
    secret: bytes = field(default=b"", repr=False)


class StartStage(msgspec.Struct, frozen=True):
    """Load this stage of the plan. 0, where a limit or a size may be, means the default, or unknown. tls: None in an
    open mesh. served: of a whole-model engine. prefix_bytes: None: no limit."""

    plan: Plan
    stage: int
    model_dir: str = ""
    options: Mapping[str, str] = {}
    host: str = ""
    port_first: int = 0
    port_last: int = 0
    max_queued: int = 0
    tls: Credentials | None = None
    rank: RankWiring | None = None
    total_bytes: int = 0
    available_bytes: int = 0
    max_running: int = 0
    prefill_chunk: int = 0
    served: ServedModel | None = None
    prefix_bytes: int | None = None
    prefix_disk: PrefixDisk | None = None
    skip_warmup: bool = False
    draft: str = ""


class LinkNext(msgspec.Struct, frozen=True):
    """The next stage listens at "host:port". keep_stream: it is the same stage by another path; connect there when the
    current stream breaks."""

    endpoint: str
    keep_stream: bool = False


class LinkRanks(msgspec.Struct, frozen=True):
    """To the leader of a tensor group: the data-plane endpoints of ranks 1 to N-1, by rank."""

    endpoints: tuple[str, ...]


class OpenHop(msgspec.Struct, frozen=True):
    """Connect to the next stage if the hop is closed because the ring is idle, and keep it open for some seconds."""


class ChangePlan(msgspec.Struct, frozen=True):
    """Continue with a plan of a higher ballot, with the same layers. keep_kv_from: stages from this one on keep the KV
    of running sequences; the number of stages: none does."""

    plan: Plan
    stage: int
    keep_kv_from: int


class Pressure(msgspec.Struct, frozen=True):
    """How short of memory this machine is: 0 there is room, 1 accept no new sequences, 2 run fewer than now.
    free_bytes: what KV of this stage may still use."""

    level: int
    free_bytes: int | None = None


class StopStage(msgspec.Struct, frozen=True):
    """End the process."""


ToRunner: TypeAlias = (
    Prepare | StartStage | LinkNext | LinkRanks | OpenHop | ChangePlan | Credentials | Pressure | StopStage
)
"""Credentials: a new certificate, for connections from now on."""
