"""The child process of a node that fetches model files, from a hub and from peers. The node itself stays light."""
