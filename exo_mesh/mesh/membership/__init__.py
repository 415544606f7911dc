"""Decides which nodes are in the mesh: identity, admission, failure detection, and the exchange of records."""
