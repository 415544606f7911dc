"""A runner: one process per stage, one engine, one compute thread, one data-plane endpoint."""
