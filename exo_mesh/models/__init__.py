"""Models, from a name to bytes on a disk.

Doors: `catalogue` (which models this node and the mesh have), `cards` (what is known of a model), `downloads` (every
fetch of this node), `fetcher` (the process that fetches, checks and writes), `file_server` (sends files to peers).

Invariants: only the fetcher's process talks to a hub and writes into fetched directories; a byte of a weight is checked
against a digest, or marked as unverified; a file gets its name only when it is whole.

Not here: how a model file is read (`weights`), and where a model runs (`rings`).
"""
