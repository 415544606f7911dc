"""An engine without weights: deterministic text at a configurable cost, for tests, demos and measuring the mesh
itself."""

from exo_mesh_dummy.provider import DummyProvider
from exo_mesh_dummy.text_provider import DummyTextProvider

provider = DummyProvider()
text_provider = DummyTextProvider()
