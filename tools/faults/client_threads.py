"""Threads that ask one question after the other until they are stopped."""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

AnswerT = TypeVar("AnswerT")


class ClientThreads(ABC, Generic[AnswerT]):
    """Runs `count` threads; each asks again as soon as it has its answer, until `stop` or the first failure. `answers`
    counts only complete and correct answers. A subclass sets what `ask` needs before it calls this `__init__`, which
    starts the threads."""

    def __init__(self, count: int, seed: int) -> None:
        self.answers: list[AnswerT] = []
        self.failure = ""
        """The first missing or wrong answer."""
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(seed + number), number), daemon=True, name="client")
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @abstractmethod
    def ask(self, rng: random.Random, number: int) -> AnswerT | str:
        """Called in a thread: gets an answer, or returns why there is none. number: of the thread, from 0."""

    def await_answers(self, more: int, deadline_s: float = 180.0) -> None:
        """Waits for this many more answers. Raises AssertionError if one failed, or it takes too long."""
        wanted = len(self.answers) + more
        with self._changed:
            come = self._changed.wait_for(lambda: len(self.answers) >= wanted or self.failure, deadline_s)
        assert not self.failure, self.failure
        assert come, f"not {more} answers within {deadline_s:g} s: the mesh is wedged"

    def stop(self) -> None:
        """Waits until every client has its last answer. Raises AssertionError as above."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(180.0)
        assert not any(thread.is_alive() for thread in self._threads), "a client waits for ever"
        assert not self.failure, self.failure

    def _run(self, rng: random.Random, number: int) -> None:
        while not self._stopping.is_set() and not self.failure:
            got = self.ask(rng, number)
            with self._changed:
                if isinstance(got, str):
                    self.failure = self.failure or got
                else:
                    self.answers.append(got)
                self._changed.notify_all()
