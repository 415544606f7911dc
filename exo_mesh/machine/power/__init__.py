"""Power, temperature and utilization of this machine and its accelerators; see docs/power.md."""
