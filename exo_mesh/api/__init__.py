"""The HTTP face of a node: OpenAI's routes and the operational ones, over the node's service port."""
