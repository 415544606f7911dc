"""Injects real faults into real nodes and records what happens to the requests.

docs/how-it-works/faults.md says how to use it.
"""
