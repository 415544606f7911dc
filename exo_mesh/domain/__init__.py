"""Pure values and decisions. No module here uses a clock, a socket, an event loop or a tensor library.

Doors: `placement` (who holds which layers), `recovery`, `routing` (which instance answers), `plan` (with its ballot),
`request` and `images`, `view` (what a peer knows of the mesh).

Invariants: the same arguments give the same result, so that every peer can verify a plan; values are frozen; bounds of
what peers may send are annotations of the fields.

Not here: anything that waits.
"""
