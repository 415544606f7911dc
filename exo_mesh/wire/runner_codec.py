"""Converts what a node and its runners say to each other to runner.proto and back."""

from __future__ import annotations

from exo_mesh.domain.stage import LoadOutcome
from exo_mesh.wire.message_codec import Codec
from exo_mesh.wire.proto import runner_pb2 as pb

LOADED = Codec(LoadOutcome, pb.Ready, besides=["rolls_back"])
