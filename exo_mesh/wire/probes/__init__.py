"""Probes as UDP datagrams: an idle node is woken once by each, while a gRPC call wakes several threads many times."""
