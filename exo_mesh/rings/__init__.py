"""A model over machines: the stages of a ring hold its layers, and a request goes round them.

Doors: `placing` plans, places, watches, recovers and ends rings; `hosting` runs the stages of this machine;
`serving` follows a request from its entry peer to its end; `runner` is the process of one stage, on the last stage with
the driver; `prefix_disk` are the files with KV of prompts.

Invariants: a plan is in force under a ballot, and every message names it; owners reach stages, their own too, by peer
calls; a node and its runners share messages and domain values only; a request ends once, whatever is lost.

Not here: how a plan is solved (`domain.placement`), and what an engine computes (`engine`).
"""
