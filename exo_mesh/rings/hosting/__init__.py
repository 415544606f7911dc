"""Runs this machine's part of any plan: stages, supervision, reservations, limits."""
