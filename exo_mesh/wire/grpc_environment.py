"""The environment of gRPC's C core, which it reads when it is first used."""

from __future__ import annotations

import sys

QUICK_POLLING = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"} if sys.platform == "linux" else {}
"""gRPC's event engine reads a socket in one thread, handles the bytes in another and notifies a third; without the
engine the third thread does all of it. That saves a quarter of a hop, and the wake-ups of an idle node, measured on
Linux; other systems are not measured."""
