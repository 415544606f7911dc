"""What this machine and its accelerators draw, how hot and how busy they are; see docs/reference/power.md."""
