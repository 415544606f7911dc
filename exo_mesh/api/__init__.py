"""The HTTP API of a node: OpenAI's routes and the operational routes, built on the node's MeshService."""
