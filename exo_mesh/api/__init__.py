"""The HTTP API of a node, on port 52415.

Doors: `app` builds it from one table of routes, from which the router, the roles of keys and the OpenAPI document
follow. A dialect has its own folder (`openai`, `responses`, `anthropic`, `ollama`, `embedding`) that translates bodies
into the neutral request of `core`; `core` renders, encodes and answers. `web` is the page.

Invariants: every field of a body is honoured or refused with its name; templates and long texts are handled in child
processes; a body that waits is not read. Handlers ask a node only through its services.

Not here: which ring answers a request, and how it continues when a machine is lost (`rings.serving`).
"""
