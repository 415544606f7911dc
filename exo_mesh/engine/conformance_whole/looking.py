"""Checks what a provider reports of its servers: up with their models, down with the reason, and up again."""

from __future__ import annotations

import dataclasses
import time

import pytest

from exo_mesh.engine.conformance_whole.asking import look, run
from exo_mesh.engine.conformance_whole.subject import WholeSubject
from exo_mesh.errors import InputError

__all__ = [
    "test_a_server_that_is_down_is_reported_with_the_reason",
    "test_a_server_that_is_up_is_reported_with_its_models",
    "test_looking_refuses_an_option_that_does_not_exist",
]

MOST_LOOK_S = 4.0
"""The contract says 2 s for a server that does not answer; the rest is for a busy machine."""


def test_a_server_that_is_up_is_reported_with_its_models(running_subject: WholeSubject) -> None:
    reports = run(look(running_subject))
    up = [report for report in reports if report.is_up]
    assert up and not any(report.error for report in up)
    for report in up:
        host, _, port = report.server.rpartition(":")
        assert host and port.isdecimal(), report.server
        names = [model.name for model in report.models]
        assert names and len(set(names)) == len(names)
        for model in report.models:
            assert model.engine == running_subject.load_provider().name
            assert (model.server, model.name.strip()) == (report.server, model.name)
            assert model.served_name and model.context_limit >= 0 and model.slots >= 0


def test_a_server_that_is_down_is_reported_with_the_reason(running_subject: WholeSubject) -> None:
    before = run(look(running_subject))
    running_subject.server.kill()
    began = time.monotonic()
    down = run(look(running_subject))
    assert time.monotonic() - began < MOST_LOOK_S
    assert not any(report.is_up for report in down)
    assert all(report.error and not report.models for report in down)
    running_subject.server.start()
    assert run(look(running_subject)) == before


def test_looking_refuses_an_option_that_does_not_exist(running_subject: WholeSubject) -> None:
    wrong = dataclasses.replace(running_subject, options={**running_subject.options, "no_such_option": "1"})
    with pytest.raises(InputError, match="no_such_option"):
        run(look(wrong))
