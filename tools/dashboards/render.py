"""Renders a board as the JSON that Grafana reads, through the types of grafana-foundation-sdk."""

from __future__ import annotations

import itertools
import json
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from tools.dashboards.boards import Board, Panel, Variable

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAG = "exo-mesh"
_OF_INTERVALS = {"auto", "auto_count", "auto_min"}
"""The SDK writes these fields for every variable; Grafana accepts them only for variables of the type interval."""
_BUILDERS: dict[str, Any] = {
    "timeseries": timeseries.Panel,
    "stat": stat.Panel,
    "table": table.Panel,
    "state-timeline": statetimeline.Panel,
}


def to_json(board: Board) -> str:
    """Returns the file of a board, with a newline at the end."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(f"exo-mesh-{board.name}")
        .description(board.description)
        .tags([TAG])
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .variables(_variables(board))
        .link(_links_to_the_other_boards())
    )
    numbers = itertools.count(1)
    for row in board.rows:
        built = built.with_row(dashboard.Row(row.title).id(next(numbers)))
        for panel in row.panels:
            built = built.with_panel(_panel(panel, next(numbers)))
    plain = json.loads(json.dumps(built.build(), cls=JSONEncoder))
    for variable in plain["templating"]["list"]:
        for key in _OF_INTERVALS & variable.keys():
            del variable[key]
    return json.dumps(plain, indent=2, sort_keys=True) + "\n"


def _links_to_the_other_boards() -> dashboard.DashboardLink:
    link = dashboard.DashboardLink("exo-mesh").type(models.DashboardLinkType.DASHBOARDS)
    return link.tags([TAG]).include_vars(True).keep_time(True)


def _variables(board: Board) -> list[Any]:
    job = "label_values(exo_mesh_build_info, job)"
    instance = 'label_values(exo_mesh_build_info{job=~"$job"}, instance)'
    first = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    return [
        first,
        _choice("job", "Job", job),
        _choice("instance", "Instance", instance),
        *(_choice(each.name, each.label, _values(each)) for each in board.variables),
    ]


def _values(variable: Variable) -> str:
    return f'label_values({variable.metric}{{job=~"$job", instance=~"$instance"}}, {variable.name})'


def _choice(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """A variable with several values, or all; queried again when the time range changes."""
    everything = models.VariableOption(text="All", value="$__all", selected=True)
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(DATASOURCE)
        .multi(True)
        .include_all(True)
        .all_value(".+")
        .current(everything)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def _panel(panel: Panel, number: int) -> Any:
    built = (
        _BUILDERS[panel.kind]()
        .id(number)
        .title(panel.title)
        .description(panel.description)
        .datasource(DATASOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(panel.height)
    )
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        built = built.with_target(_target(panel, letter, query.expr, query.legend))
    if panel.maximum is not None:
        built = built.max(panel.maximum)
    if panel.thresholds:
        steps = [models.Threshold(value, colour) for value, colour in panel.thresholds]
        built = built.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.kind == "stat":
        return built.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    if panel.kind == "table":
        hidden = {"excludeByName": {"Time": True, "Value": True}}  # the labels are the content of the table
        return built.with_transformation(models.DataTransformerConfig(id_val="organize", options=hidden))
    return _of_lines(built, panel) if panel.kind == "timeseries" else built


def _target(panel: Panel, letter: str, expr: str, legend: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(expr).ref_id(letter).legend_format(legend)
    if panel.kind == "table":
        return target.instant().format(PromQueryFormat.TABLE)
    return target.range()


def _of_lines(built: timeseries.Panel, panel: Panel) -> timeseries.Panel:
    """Settings for line charts: they begin at zero, and their legend is a table with the last and highest value."""
    legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.TABLE).show_legend(True)
    legend = legend.placement(common_models.LegendPlacement.BOTTOM).calcs(["lastNotNull", "max"])
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    built = built.legend(legend).tooltip(tooltip).min(0).fill_opacity(30 if panel.stacked else 5)
    if panel.events:
        built = built.draw_style(common_models.GraphDrawStyle.BARS)
    if panel.stacked:
        built = built.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    return built
