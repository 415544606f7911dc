"""Secures a mesh by one secret: certificates and signed announcements. Also HTTP API keys, which need no secret."""
