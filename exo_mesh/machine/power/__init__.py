"""Power, temperature and utilization of this machine and its accelerators; see docs/reference/power.md."""
