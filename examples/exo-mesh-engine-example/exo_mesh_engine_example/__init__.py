"""An engine for exo-mesh in a package of its own; the entry point in pyproject.toml names `provider`."""

from exo_mesh_engine_example.provider import ExampleProvider

provider = ExampleProvider()
