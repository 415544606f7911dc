"""Real nodes, real faults, and what became of the requests. docs/how-it-works/faults.md says how to use it."""
