"""The contracts between exo-mesh and its engines. Engines import this package and the domain, and nothing else of
exo-mesh."""
