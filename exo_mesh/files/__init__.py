"""The file server of a node: peers read the files of its models from it, over a port of its own.

A package of its own, above `weights` and `transport`, because it needs checkpoints on disk and sockets alike; it knows
no node. The fetcher, which is its client, shares `messages`, `pace` and `tls` with it.
"""
