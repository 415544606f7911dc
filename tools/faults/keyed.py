"""Clients that send a request again with its Idempotency-Key until they have the whole answer, as docs/continuation.md
tells them to."""

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

from tools.faults.mesh import MODEL
from tools.faults.stream import Question, counting

PATIENCE_S = 90.0
"""How long a client tries for one answer."""

CLIENT_SILENCE_S = 10.0
"""The API says something every 2 s. A peer that is silent for so long is taken for dead, whatever it is."""

PAUSE_S = 0.1
"""Between two tries."""

WORTH_ANOTHER_TRY = frozenset({"node_stopping", "not_ready", "broken_off", "no_connection", "bad_gateway"})
"""What a client may see of a peer that restarts: refused, cut by its stop, gone, or a proxy that says so."""


@dataclass
class KeyedAnswer:
    """One answer over all its tries. troubles: what ended each try but the last."""

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


class KeyedClients:
    """`count` threads; each asks again as soon as it has its answer, until `stop`. Every other one goes on after what
    it has (Last-Event-ID), the others ask for all of it again.

    urls: answers where to ask now, a random one each time: at the peers themselves, or at one proxy before them.
    """

    def __init__(self, urls: Callable[[], Sequence[str]], count: int, seed: int) -> None:
        self.answers: list[KeyedAnswer] = []
        self.failure = ""
        """The first answer that was not had, or was wrong."""
        self._urls = urls
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + number), number % 2 == 0), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def troubles(self) -> Counter[str]:
        """What the clients have seen and got over."""
        return Counter(trouble for answer in self.answers for trouble in answer.troubles)

    def await_answers(self, more: int, deadline_s: float = 180.0) -> None:
        """Wait until so many more have come. Raises AssertionError if one failed, or it takes too long."""
        wanted = len(self.answers) + more
        with self._changed:
            come = self._changed.wait_for(lambda: len(self.answers) >= wanted or self.failure, deadline_s)
        assert not self.failure, self.failure
        assert come, f"not {more} answers within {deadline_s:g} s: the mesh is wedged"

    def stop(self) -> None:
        """Let every client have its last answer. Raises AssertionError as above."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a client waits for ever"
        assert not self.failure, self.failure

    def _run(self, rng: random.Random, continues: bool) -> None:
        while not self._stopping.is_set() and not self.failure:
            first = rng.randrange(10, 120)
            answer = KeyedAnswer(counting(first, first + rng.randrange(5, 40)))
            begin = time.monotonic()
            trouble = self._ask(answer, rng, continues)
            answer.seconds = time.monotonic() - begin
            with self._changed:
                if trouble or not answer.is_right:
                    what = f"{trouble or answer.finish} {answer.message} after {answer.text!r}, {answer.troubles}"
                    self.failure = self.failure or what
                else:
                    self.answers.append(answer)
                self._changed.notify_all()

    def _ask(self, answer: KeyedAnswer, rng: random.Random, continues: bool) -> str:
        """Try until the answer is whole; the last trouble if it never is."""
        give_up_at = time.monotonic() + PATIENCE_S
        pause = threading.Event()
        while trouble := _try(rng.choice(self._urls()), answer, continues):
            if trouble not in WORTH_ANOTHER_TRY or time.monotonic() > give_up_at:
                return trouble
            answer.troubles.append(trouble)
            pause.wait(PAUSE_S)
        return ""


def _try(url: str, answer: KeyedAnswer, continues: bool) -> str:
    """Ask once; why that was not the end, or ""."""
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
        return "bad_gateway"  # by a proxy, which had nobody to ask
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
