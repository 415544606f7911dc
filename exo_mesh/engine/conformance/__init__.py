"""The conformance suite for stage engines, as pytest functions: for the engines here and for any other engine.

A test module of an engine's own package is two imports and a fixture (docs/reference/engines.md):

    from exo_mesh.engine.conformance import *
    from exo_mesh.engine.conformance import Subject

    @pytest.fixture(scope="module")
    def subject() -> Subject:
        return Subject("my_engine:provider")

Needs pytest, which exo-mesh itself does not need: only tests import this package.
"""

# ruff: noqa: E402, F403
import pytest

_PARTS = (
    "batching",
    "copying",
    "faults",
    "handing_on",
    "limits",
    "loading",
    "memory",
    "provider",
    "rollback",
    "rows",
    "saving",
    "warming",
)
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in (*_PARTS, "slices", "stages")))

from exo_mesh.engine.conformance.batching import *
from exo_mesh.engine.conformance.copying import *
from exo_mesh.engine.conformance.faults import *
from exo_mesh.engine.conformance.fixtures import *
from exo_mesh.engine.conformance.handing_on import *
from exo_mesh.engine.conformance.limits import *
from exo_mesh.engine.conformance.loading import *
from exo_mesh.engine.conformance.memory import *
from exo_mesh.engine.conformance.provider import *
from exo_mesh.engine.conformance.rollback import *
from exo_mesh.engine.conformance.rows import *
from exo_mesh.engine.conformance.saving import *
from exo_mesh.engine.conformance.slices import *
from exo_mesh.engine.conformance.subject import CHECKPOINT_DAMAGES as CHECKPOINT_DAMAGES
from exo_mesh.engine.conformance.subject import Damage as Damage
from exo_mesh.engine.conformance.subject import Subject as Subject
from exo_mesh.engine.conformance.warming import *
