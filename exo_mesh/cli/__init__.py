"""The command line: `exo-mesh VERB`, for people and scripts at one machine.

Doors: `main` runs a verb; `verbs` has a module or package for each. Beside them stand what verbs use: `client` (the
HTTP API as Python calls, and nodes as child processes, also for tests and tools), `doctor`, `services` (systemd and
launchd), `balancing` (nginx) and `bench`.

Invariants: a verb asks a node over HTTP as every client does; only `serve` and `demo` make a node (`wiring`). What goes
wrong ends as one line on stderr and an exit code.

Not here: anything that a node decides.
"""
