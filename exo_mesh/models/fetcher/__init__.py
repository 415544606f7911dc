"""The child process of a node that fetches model files, from a hub and from peers. It keeps the node itself small."""
