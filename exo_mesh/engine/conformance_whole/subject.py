"""Describes the subject of the suite: a whole-model engine, and a model server that the suite may stop and start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol, cast

from exo_mesh.engine.whole import WholeModelProvider


class ServerUnderTest(Protocol):
    """A model server, real or a fake, at one address for the whole suite.

    It serves at least one model. To any prompt the model answers with as many tokens as the limit and its context
    allow. With temperature 0 the same prompt has the same answer each time, and a continued answer goes on as if it had
    not been interrupted.
    """

    def start(self) -> None:
        """Starts it, and returns when it serves requests. Does nothing if it runs."""

    def kill(self) -> None:
        """Ends it at once: its connections break, as if the process or the machine had died. Does nothing if it does
        not run."""

    def num_running(self) -> int | None:
        """How many answers it computes now; None if it cannot say."""


@dataclass(frozen=True)
class WholeSubject:
    """The engine that the suite is run on.

    provider: "package:attribute", as in an entry point. server: runs at the start of each test. options: engine options
    that name the server. long_answer: tokens of an answer that takes 0.2 s or more. stops_when_cancelled: the server
    stops computing when its client hangs up; RKLLAMA does not.
    """

    provider: str
    server: ServerUnderTest
    options: Mapping[str, str] = field(default_factory=dict)
    long_answer: int = 40
    stops_when_cancelled: bool = True

    def load_provider(self) -> WholeModelProvider:
        """The provider that `provider` names."""
        module, _, attribute = self.provider.partition(":")
        return cast(WholeModelProvider, getattr(import_module(module), attribute))
