"""The HTTP API of a node: OpenAI's routes and the operational routes, over the services of the node."""
