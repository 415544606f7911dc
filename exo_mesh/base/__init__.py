"""What every other package may use: clocks, tasks, wake-ups, versions, logs and metrics."""
