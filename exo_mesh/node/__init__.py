"""A node: builds the parts of all wings, starts them, stops them in order.

Doors: `node.Node` (start, finish, stop, and its services), `parts` (what is built, in the order of the imports),
`background` (the long-lived tasks), `inspection` (diagnostics, traces and captures of all peers, for operators).

Invariants: only here do the wings meet; every long-lived task has an owner that reports its end; stopping loses no
request that another peer could continue.

Not here: decisions. What a node does with a request, a model or a peer is in the wing of that subject.
"""
