"""What waits in the inbox of a worker: frames, requests, changes of the plan, and results of other threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from exo_mesh.domain.frame import Frame
from exo_mesh.domain.request import GenerateRequest
from exo_mesh.rings.runner.mailbox import Mailbox
from exo_mesh.rings.runner.stage import StageResult
from exo_mesh.rings.runner.stage_setup import StageSetup

if TYPE_CHECKING:
    from exo_mesh.rings.runner.driver import Driver


class Submit(msgspec.Struct, frozen=True):
    request: GenerateRequest
    mailbox: Mailbox


class Cancel(msgspec.Struct, frozen=True):
    """The caller behind the mailbox is gone."""

    request_id: str
    mailbox: Mailbox


class Unpark(msgspec.Struct, frozen=True):
    """The caller behind the mailbox has read all messages."""

    request_id: str
    mailbox: Mailbox


class Reassure(msgspec.Struct, frozen=True):
    """The ring is stopped and being repaired: callers that wait for tokens get a sign of life."""


class Done(msgspec.Struct, frozen=True):
    """Another thread of the driver has finished the work that a request waits for."""

    callback: Callable[[], None]


class Failed(msgspec.Struct, frozen=True):
    """A frame failed outside of `run`: an error in exo-mesh itself, because a stage catches errors of its engine."""

    error: Exception


class Change(msgspec.Struct, frozen=True):
    """The ring continues under another plan, in which this stage has the same layers. kept_from: stages from this one
    on keep the KV of running sequences. done: called once the plan is in force, with how many requests continue at this
    driver."""

    setup: StageSetup
    kept_from: int
    done: Callable[[int], None]


class Arrived(msgspec.Struct, frozen=True):
    """A frame that waits for its turn, and since when."""

    frame: Frame
    since: float


class Computed(msgspec.Struct, frozen=True):
    """The engine's thread has computed a frame."""

    result: StageResult


Item = Arrived | Computed | Submit | Cancel | Unpark | Change | Reassure | Done | Failed


def tell(driver: Driver, item: Item) -> None:
    """Let the driver take a request, or what has become of one."""
    if isinstance(item, Submit):
        driver.submit(item.request, item.mailbox)
    elif isinstance(item, Cancel):
        driver.cancel(item.request_id, item.mailbox)
    elif isinstance(item, Unpark):
        driver.unpark(item.request_id, item.mailbox)
    elif isinstance(item, Reassure):
        driver.reassure()
    elif isinstance(item, Done):
        item.callback()
