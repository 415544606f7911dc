"""Clients that resend a request with its Idempotency-Key until they have the whole answer.

docs/how-it-works/continuation.md describes what they rely on.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tools.faults.client_threads import ClientThreads
from tools.faults.mesh import MODEL
from tools.faults.stream import Question, random_counting

PATIENCE_S = 90.0
"""How long a client tries for one answer."""

CLIENT_SILENCE_S = 10.0
"""The API sends something every 2 s. A peer that is silent this long counts as dead, for whatever reason."""

PAUSE_S = 0.1
"""Pause between two attempts."""

WORTH_ANOTHER_TRY = frozenset({"node_stopping", "not_ready", "broken_off", "no_connection", "bad_gateway"})
"""What a client may see of a restarting peer: refused, cut by the stop, gone, or a proxy's error for one of these."""


@dataclass
class KeyedAnswer:
    """One answer over all its attempts. troubles: what ended each attempt but the last."""

    question: Question
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    text: str = ""
    last_event: str = ""
    finish: str = ""
    troubles: list[str] = field(default_factory=list)
    message: str = ""
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        return self.finish == "stop" and self.text == self.question.answer


class KeyedClients(ClientThreads[KeyedAnswer]):
    """Clients with keys: every other thread resumes after what it has (Last-Event-ID), the others request the whole
    answer again.

    urls: returns where to ask now, a random address each time: the peers themselves, or one proxy in front of them.
    """

    def __init__(self, urls: Callable[[], Sequence[str]], count: int, seed: int) -> None:
        self._urls = urls
        super().__init__(count, seed)

    @property
    def troubles(self) -> Counter[str]:
        """The failures that the clients have seen and recovered from."""
        return Counter(trouble for answer in self.answers for trouble in answer.troubles)

    def ask(self, rng: random.Random, number: int) -> KeyedAnswer | str:
        answer = KeyedAnswer(random_counting(rng))
        begin = time.monotonic()
        trouble = self._ask(answer, rng, continues=number % 2 == 0)
        answer.seconds = time.monotonic() - begin
        if not trouble and answer.is_right:
            return answer
        return f"{trouble or answer.finish} {answer.message} after {answer.text!r}, {answer.troubles}"

    def _ask(self, answer: KeyedAnswer, rng: random.Random, *, continues: bool) -> str:
        """Tries until the answer is complete; returns the last failure if it never is."""
        give_up_at = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        while trouble := _try(rng.choice(self._urls()), answer, continues):
            if trouble not in WORTH_ANOTHER_TRY or time.monotonic() > give_up_at:
                return trouble
            answer.troubles.append(trouble)
            pause.wait(PAUSE_S)
        return ""


def _try(url: str, answer: KeyedAnswer, continues: bool) -> str:
    """Asks once; returns why the answer is not complete, or ""."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": answer.question.text}], "temperature": 0}
    headers = {"Content-Type": "application/json", "Idempotency-Key": answer.key}
    if continues and answer.last_event:
        headers["Last-Event-ID"] = answer.last_event
    else:
        answer.text = answer.last_event = ""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=CLIENT_SILENCE_S)
    try:
        connection.connect()
    except OSError:
        return "no_connection"
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), headers)
        reply = connection.getresponse()
        return _read(reply, answer) if reply.status == 200 else _refusal(reply, answer)
    except (OSError, http.client.HTTPException, ValueError) as exc:
        answer.message = repr(exc)
        return "broken_off"
    finally:
        connection.close()


def _refusal(reply: http.client.HTTPResponse, answer: KeyedAnswer) -> str:
    if reply.status in (502, 504) and "json" not in (reply.getheader("content-type") or ""):
        return "bad_gateway"  # from a proxy without a reachable node
    error = json.loads(reply.read())["error"]
    answer.message = str(error["message"])
    return str(error["code"])


def _read(reply: http.client.HTTPResponse, answer: KeyedAnswer) -> str:
    coming = ""
    for line in reply:
        if line.startswith(b"id: "):
            coming = line[4:].decode().strip()
        elif line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                answer.message = str(event["error"]["message"])
                return str(event["error"]["code"])
            answer.last_event = coming
            for choice in event["choices"]:
                answer.text += choice["delta"].get("content") or ""
                answer.finish = choice["finish_reason"] or answer.finish
    return "" if answer.finish else "broken_off"
