"""Who is in the mesh: identity, admission, liveness, and the exchange of records."""
