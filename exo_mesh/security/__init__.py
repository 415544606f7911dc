"""Secures a mesh by one secret: certificates, signed datagrams, seals. Also keys of the HTTP API, which need none.

Doors: `credentials` (of this node), `keys` (derived from the secret), `key_table` (API keys, and how two tables become
one), `probe_seal`.

Invariants: a secret leaves a machine only by `invite`; comparisons take constant time; certificates are renewed while
streams run.

Not here: who may call what (`api.access` over HTTP, the rows of `wire.peer_call` between peers).
"""
