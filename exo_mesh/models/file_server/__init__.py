"""The file server of a node: peers read the files of its models from it, over a port of its own.

It is a separate package, above `weights` and `transport`, because it needs both checkpoints on disk and sockets; it
does not depend on the node. The fetcher, which is its client, shares `messages`, `pace` and `tls` with it.
"""
