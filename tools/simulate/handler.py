"""The node's side of a control endpoint that has only a membership."""

from __future__ import annotations

from typing import Any

from exo_mesh.mesh.membership.service import Membership
from exo_mesh.wire.proto import control_pb2 as pb


class MembershipHandler:
    """Passes on the membership's answers; the other calls need whole nodes."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def hello(self, request: pb.HelloRequest, caller_host: str) -> pb.HelloReply:
        return await self._membership.answer_hello(request, caller_host)

    async def probe(self, request: pb.ProbeRequest) -> pb.ProbeReply:
        return self._membership.answer_probe(request)

    async def indirect_probe(self, request: pb.IndirectProbeRequest) -> pb.IndirectProbeReply:
        return await self._membership.answer_indirect_probe(request)

    async def exchange(self, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        return self._membership.answer_exchange(request)

    async def goodbye(self, request: pb.GoodbyeRequest) -> pb.GoodbyeReply:
        return self._membership.answer_goodbye(request)

    async def wake(self, request: pb.WakeRequest) -> pb.WakeReply:
        return self._membership.sleeps.answer_wake(request)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not a call of the membership")
