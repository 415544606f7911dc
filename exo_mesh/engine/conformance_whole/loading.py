"""Checks that loading declares what the engine can do, and names what is missing."""

from __future__ import annotations

import msgspec
import pytest

from exo_mesh.engine.conformance_whole.asking import first_model, loaded, run
from exo_mesh.engine.conformance_whole.subject import WholeSubject
from exo_mesh.engine.whole import WholeLoadRequest
from exo_mesh.errors import EngineError, MeshError, ModelError, StageLostError

__all__ = [
    "test_a_loaded_engine_declares_its_slots_and_can_serve",
    "test_a_model_that_the_server_does_not_have_is_refused_by_name",
    "test_a_server_that_is_down_cannot_be_loaded_from",
    "test_loading_reports_progress_up_to_its_total",
]


def test_a_loaded_engine_declares_its_slots_and_can_serve(running_subject: WholeSubject) -> None:
    async def work() -> None:
        async with loaded(running_subject) as engine:
            assert engine.slots >= 1
            assert engine.continues in (True, False)
            assert engine.memory_bytes() >= 0
            await engine.check()

    run(work())


def test_loading_reports_progress_up_to_its_total(running_subject: WholeSubject) -> None:
    seen: list[tuple[int, int]] = []

    async def work() -> None:
        model = await first_model(running_subject)
        engine = running_subject.load_provider().create()
        await engine.load(
            WholeLoadRequest(model, running_subject.options), lambda done, total: seen.append((done, total))
        )
        await engine.close()

    run(work())
    done, totals = zip(*seen, strict=True)
    assert len(set(totals)) == 1 and totals[0] > 0
    assert list(done) == sorted(done) and done[-1] == totals[0]


def test_a_model_that_the_server_does_not_have_is_refused_by_name(running_subject: WholeSubject) -> None:
    async def work() -> None:
        missing = msgspec.structs.replace(await first_model(running_subject), served_name="no-such-model")
        engine = running_subject.load_provider().create()
        try:
            await engine.load(WholeLoadRequest(missing, running_subject.options), lambda done, total: None)
        finally:
            await engine.close()

    with pytest.raises(ModelError, match="no-such-model"):
        run(work())


def test_a_server_that_is_down_cannot_be_loaded_from(running_subject: WholeSubject) -> None:
    async def work() -> MeshError:
        model = await first_model(running_subject)
        running_subject.server.kill()
        engine = running_subject.load_provider().create()
        try:
            with pytest.raises((EngineError, StageLostError)) as caught:
                await engine.load(WholeLoadRequest(model, running_subject.options), lambda done, total: None)
        finally:
            await engine.close()
        assert isinstance(caught.value, MeshError)
        return caught.value

    assert str(run(work()))
