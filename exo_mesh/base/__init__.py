"""What every wing may use: clocks, tasks, wake-ups, versions, printable text, logs and metrics.

Doors: `tasks.TaskOwner` (every task has one), `wakeups` (waits that share a tick), `clock`, `printable` (texts of
others), `versions`, `telemetry` (logging, metric families, tables).

Invariants: imports nothing of ours but `errors`; metrics are passed as arguments and never global.

Not here: anything that knows a peer, a model or a request.
"""
