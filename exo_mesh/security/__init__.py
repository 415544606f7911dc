"""What one secret gives a mesh: certificates, signed announcements. And keys of the HTTP API, which need no secret."""
