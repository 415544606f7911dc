"""Moves values between processes, over protobuf and gRPC.

Doors: `peer_call` (a call between peers, said once as a row), `control_client` and `control_server` (carry any row),
`channels` (every channel and server, with TLS), `codec` and `ring_*` (frames), `control_driver` (a request and its
tokens), `runner_pipe` (node and runner), `data_server` (the port of a runner), `proto` (generated code).

Invariants: a version may only add; what comes from a peer is bounded and printable before anything else sees it; the
tensors of a frame are not copied.

Not here: what a message means (the `calls.py` of each wing).
"""
