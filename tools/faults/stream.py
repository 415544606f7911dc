"""A client that streams one answer and records the time of each piece."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol
from urllib.parse import urlsplit

from tools.faults.mesh import MODEL

SILENCE_S = 120.0
"""Read timeout: the API sends something at least every 10 s."""

PATIENCE_S = 4.0
"""Read timeout of a client that can ask another peer. A waiting stream gets a comment every 2 s."""

PAUSE_S = 0.05
"""Pause of such a client between two peers."""

ENTRY_LOST = ("broken_off", "node_stopping", "not_ready")


class HasUrl(Protocol):
    """A server of the API: a node, or a proxy in front of the nodes."""

    @property
    def url(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its right answer."""

    text: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)


MISCOUNTED = {(80, 107)}
"""The only question that the demo model answers wrong of the 3,850 that `random_counting` draws from: it counts down,
and on to its limit."""


def random_counting(rng: random.Random) -> Question:
    """Draws a counting question that the demo model answers right."""
    while True:
        first = rng.randrange(10, 120)
        last = first + rng.randrange(5, 40)
        if (first, last) not in MISCOUNTED:
            return counting(first, last)


def counting(first: int, last: int) -> Question:
    """Returns a counting question. The demo model counts almost always without an error between 0 and 199, and every
    number is checked."""
    return Question(f"Count from {first} to {last}.", ", ".join(map(str, range(first, last + 1))))


class Stream:
    """A client that asks at once, in a thread. `text` grows; `ended` is set after the single end: `finish` or `error`.

    elsewhere: peers that it asks for the rest, by its Idempotency-Key, after the first peer has broken off, was silent
    for PATIENCE_S, or stops.
    """

    def __init__(self, node: HasUrl, question: Question, *, elsewhere: Sequence[HasUrl] = (), **fields: Any) -> None:
        self.question = question
        self.pieces: list[tuple[float, str]] = []
        """(Unix time, text)"""
        self.comments: list[str] = []
        self.finish = ""
        self.error = ""
        """The code of the error."""
        self.message = ""
        self.num_ends = 0
        self.num_asked = 0
        """How many times it has sent its request."""
        self.ended = threading.Event()
        self.sent_at = time.time()
        self.ended_at = 0.0
        body = {"model": MODEL, "messages": [{"role": "user", "content": question.text}], "temperature": 0}
        self._body = json.dumps({**body, "stream": True, **question.fields, **fields})
        self._urls = [node.url, *(other.url for other in elsewhere)]
        self._key = uuid.uuid4().hex if elsewhere else ""
        self._last_event = self._coming = ""
        """Ids of the last event that was read, and of the event whose data is being read."""
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="stream").start()

    @property
    def text(self) -> str:
        return "".join(text for _, text in list(self.pieces))

    @property
    def outcome(self) -> str:
        return self.error or self.finish or "open"

    @property
    def is_right(self) -> bool:
        """Whether the answer is complete and every character is right."""
        return self.finish == "stop" and self.text == self.question.answer and self.num_ends == 1

    def await_text(self, length: int, deadline_s: float = 60.0) -> bool:
        """Waits for this many characters; False if the stream ended before."""
        with self._changed:
            come = self._changed.wait_for(lambda: len(self.text) >= length or self.ended.is_set(), deadline_s)
        assert come, f"not {length} characters within {deadline_s:g} s but {self.text!r}"
        return len(self.text) >= length

    def await_end(self, deadline_s: float = 120.0) -> None:
        assert self.ended.wait(deadline_s), f"no end within {deadline_s:g} s after {self.text!r}"

    def gap_s(self, since: float) -> float:
        """Returns the longest time without a piece after a Unix time, until the last piece or the end."""
        since = max(since, self.sent_at)
        times = [since, *(at for at, _ in self.pieces if at > since), max(since, self.ended_at)]
        return max(after - before for before, after in pairwise(times))

    def _run(self) -> None:
        give_up_at, pause = time.monotonic() + SILENCE_S, threading.Event()
        try:
            self._ask(self._urls[0])
            while self._key and self.error in ENTRY_LOST and time.monotonic() < give_up_at:
                self.error, self.num_ends = "", 0
                pause.wait(PAUSE_S)
                self._urls.append(self._urls.pop(0))
                self._ask(self._urls[0])
        finally:
            self.ended_at = time.time()
            with self._changed:
                self.ended.set()
                self._changed.notify_all()

    def _ask(self, url: str) -> None:
        address = urlsplit(url)
        self.num_asked += 1
        silence_s = PATIENCE_S if self._key else SILENCE_S
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=silence_s)
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Idempotency-Key"] = self._key
        if self._last_event:
            headers["Last-Event-ID"] = self._last_event
        try:
            connection.request("POST", "/v1/chat/completions", self._body, headers)
            reply = connection.getresponse()
            if reply.status != 200:
                self._fail(json.loads(reply.read())["error"])
                return
            for line in reply:
                self._take(line)
            if not self.num_ends:
                self._fail({"code": "broken_off", "message": "the stream ended before the answer"})
        except (OSError, http.client.HTTPException, ValueError) as exc:
            self._fail({"code": "broken_off", "message": repr(exc)})
        finally:
            connection.close()

    def _take(self, line: bytes) -> None:
        if line.startswith(b"id: "):
            self._coming = line[4:].decode().strip()
        if line.startswith(b": "):
            self.comments.append(line[2:].decode().strip())
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            self._fail(event["error"])
            return
        self._last_event = self._coming
        for choice in event["choices"]:
            text, finish = choice["delta"].get("content"), choice["finish_reason"]
            with self._changed:
                if text:
                    self.pieces.append((time.time(), text))
                if finish:
                    self.finish, self.num_ends = finish, self.num_ends + 1
                self._changed.notify_all()

    def _fail(self, error: dict[str, Any]) -> None:
        self.error, self.message = str(error.get("code")), str(error.get("message"))
        self.num_ends += 1
