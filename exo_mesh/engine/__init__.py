"""The contracts between exo-mesh and its engines, and the suite that every engine passes.

Doors: `contract` (a stage of layers), `whole` (an engine that takes text), `registry` (finds engines by entry points),
`conformance` (the tests, also for engines of others), `measure` and `layer_speed` (how fast an engine is).

Invariants: authors of engines import this package, `domain`, `weights` and `errors`, nothing else; an engine runs in a
runner's process only; the same rows give the same bits, in whatever batches they come, where the contract says so.

Not here: the engines themselves (`engines/`), and the loop that calls them (`rings.runner`).
"""
