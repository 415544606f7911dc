"""Shows in the metrics what a look at the model servers of this node has found."""

from __future__ import annotations

from collections.abc import Sequence

from exo_mesh.base.telemetry.rkllm_metrics import RkllmMetrics
from exo_mesh.domain.whole.served import ServerReport
from exo_mesh.models.served import OnReports


def shown_in(metrics: RkllmMetrics) -> OnReports:
    """The `on_reports` of ServedModels that keeps `exo_mesh_rkllm_server_up` as the last look found it.

    A report without an address is about wrong options and no server.
    """

    def note(engine: str, reports: Sequence[ServerReport]) -> None:
        metrics.note_servers(engine, {report.server: report.is_up for report in reports if report.server})

    return note
