"""Settings: from flags, environment variables, a file and defaults, in this order.

Doors: `config.Settings` (every setting, said once), `effective` (what the mesh has set above it).

Invariants: an unknown name is refused with the nearest known one; a value is checked when it is read; secrets are
never shown.

Not here: what a setting does.
"""
