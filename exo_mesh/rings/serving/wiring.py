"""Builds the parts of a node that serve requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from exo_mesh.base.clock import Clock
from exo_mesh.base.telemetry.metrics import Metrics
from exo_mesh.mesh.membership.service import Membership
from exo_mesh.rings.placing.wiring import InstanceParts
from exo_mesh.rings.serving import calls
from exo_mesh.rings.serving.dispatcher import Dispatcher
from exo_mesh.rings.serving.history import History
from exo_mesh.rings.serving.journal import Journal
from exo_mesh.rings.serving.kept_answers import KeptAnswers
from exo_mesh.rings.serving.kept_service import KeptService
from exo_mesh.rings.serving.live import LiveStreams
from exo_mesh.rings.serving.request_file import RequestFile, request_file
from exo_mesh.rings.serving.request_run import Patience
from exo_mesh.rings.serving.router import Router
from exo_mesh.rings.serving.stream_service import StreamService
from exo_mesh.rings.serving.traces import RequestTrace, TraceStore
from exo_mesh.security.credentials import CredentialSource
from exo_mesh.settings.config import Settings
from exo_mesh.wire.control_driver import DriverChannels
from exo_mesh.wire.peer_call import AnyAnswer


class ServingParts(msgspec.Struct, frozen=True):
    """The parts of a node that serve requests. request_file: None if the request log is off. answers: to
    the calls of peers."""

    journal: Journal
    drivers: DriverChannels
    router: Router
    request_file: RequestFile | None
    streams: StreamService
    kept: KeptService
    answers: Sequence[AnyAnswer]

    @staticmethod
    def build(
        settings: Settings,
        membership: Membership,
        instances: InstanceParts,
        credentials: CredentialSource | None,
        used_bytes: Callable[[], int],
        metrics: Metrics,
        patience: Patience,
        clock: Clock,
        stand_ins: Callable[[str], list[str]],
        on_trace: Callable[[RequestTrace], object],
    ) -> ServingParts:
        """Build the parts. used_bytes: memory in use on this machine. stand_ins: see Rings. on_trace: called
        with each trace that has ended. The settings' time limits replace those of `patience`."""
        file = request_file(settings.request_log, settings.home)
        history = History(max_recent=settings.request_log_max, write=None if file is None else file.write)
        journal = Journal(history=history, used_bytes=used_bytes, clock=clock)
        drivers = DriverChannels(credentials)
        patience = replace(
            patience,
            queue_s=settings.queue_timeout,
            first_s=settings.prefill_timeout,
            next_s=settings.token_timeout,
            total_s=settings.response_timeout,
        )
        live = LiveStreams()
        rings = Dispatcher(
            instances.instances,
            instances.members,
            drivers,
            journal,
            clock,
            auto_place=settings.auto_place,
            stand_ins=stand_ins,
            max_queued=settings.max_queued,
        )
        router = Router(rings, journal, metrics.requests, patience, live, TraceStore(on_end=on_trace), clock)
        streams = StreamService(membership, live)
        kept_answers = KeptAnswers(settings.keep_responses, clock, on_change=metrics.show_kept)
        kept = KeptService(membership, kept_answers)
        answers = calls.answers(membership.own.id, journal, live, kept_answers)
        return ServingParts(journal, drivers, router, file, streams, kept, answers)

    async def stop(self) -> None:
        """Close the connections and the request log, after the requests have ended."""
        await self.drivers.close()
        if self.request_file is not None:
            await asyncio.to_thread(self.request_file.close)
