"""The conformance suite for whole-model engines, as pytest functions: for the engines here and for any other engine.

A test module is two imports and a fixture (docs/reference/engines.md):

    from exo_mesh.engine.conformance_whole import *
    from exo_mesh.engine.conformance_whole import WholeSubject

    @pytest.fixture(scope="module")
    def whole_subject(tmp_path_factory) -> Iterator[WholeSubject]:
        with MyServer(...) as server:
            yield WholeSubject("my_engine:provider", server)

Every test makes an event loop of its own, so no plugin for asyncio is needed. Needs pytest, which exo-mesh itself does
not need: only tests import this package.
"""

# ruff: noqa: E402, F403
import pytest

_PARTS = ("answering", "asking", "cancelling", "continuing", "loading", "looking", "losing", "providing")
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from exo_mesh.engine.conformance_whole.answering import *
from exo_mesh.engine.conformance_whole.asking import *
from exo_mesh.engine.conformance_whole.cancelling import *
from exo_mesh.engine.conformance_whole.continuing import *
from exo_mesh.engine.conformance_whole.loading import *
from exo_mesh.engine.conformance_whole.looking import *
from exo_mesh.engine.conformance_whole.losing import *
from exo_mesh.engine.conformance_whole.providing import *
from exo_mesh.engine.conformance_whole.subject import ServerUnderTest as ServerUnderTest
from exo_mesh.engine.conformance_whole.subject import WholeSubject as WholeSubject
