"""Serves one request: finds its ring, follows it to its end, and keeps everything needed to continue."""
