"""Builds the Grafana dashboards of monitoring/grafana/dashboards: `python -m tools.dashboards [--check]`."""
