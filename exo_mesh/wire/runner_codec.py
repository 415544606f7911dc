"""Converts what a node and its runners say to each other to runner.proto and back."""

from __future__ import annotations

from exo_mesh.domain.runner.heartbeat import Heartbeat
from exo_mesh.domain.runner.reports import (
    EnginePrepared,
    FromRunner,
    HopBroke,
    PlanChanged,
    RunnerFailed,
    RunnerListening,
    RunnerReady,
)
from exo_mesh.domain.stage import StageLoading
from exo_mesh.wire.message_codec import UnionCodec
from exo_mesh.wire.proto import runner_pb2 as pb

FROM_RUNNER: UnionCodec[FromRunner, pb.FromRunner] = UnionCodec(
    pb.FromRunner,
    prepared=EnginePrepared,
    loading=StageLoading,
    listening=RunnerListening,
    ready=RunnerReady,
    heartbeat=Heartbeat,
    changed=PlanChanged,
    hop_lost=HopBroke,
    failed=RunnerFailed,
)
