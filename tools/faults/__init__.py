"""Real nodes, real faults, and what became of the requests. docs/faults.md says how to use it."""
