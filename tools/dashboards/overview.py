"""The first board to open: whether the mesh is up, how fast it is, and its problems."""

from __future__ import annotations

from typing import Any

from tools.dashboards.boards import Board, Panel, Query, Row, events, quantile, quantiles, rate, series, total

_ERROR_SHARE = (
    f"({total(rate('exo_mesh_errors_total'))} or vector(0))"
    f" / ({total(rate('exo_mesh_requests_total'))} > 0) or vector(0)"
)

_STAT: dict[str, Any] = {"kind": "stat", "width": 4, "height": 4}

_NOW = (
    Panel(
        "Live nodes",
        "Largest number of live nodes that any node of the mesh sees, itself included.",
        "short",
        (Query(f"max({series('exo_mesh_nodes_active')})", "nodes"),),
        **_STAT,
    ),
    Panel(
        "Nodes that are ready",
        "Nodes whose /readyz answers 200. If fewer than the live nodes, some drain, wait for peers or have failed.",
        "short",
        (Query(total(series("exo_mesh_node_ready")), "ready"),),
        **_STAT,
    ),
    Panel(
        "Requests in progress",
        "Requests that have entered and not ended, on all chosen nodes.",
        "short",
        (Query(total(series("exo_mesh_requests_in_progress")), "requests"),),
        **_STAT,
    ),
    Panel(
        "Output tokens per second",
        "Tokens that clients receive now, over all models.",
        "short",
        (Query(total(rate("exo_mesh_tokens_generated_total")), "tokens/s"),),
        **_STAT,
    ),
    Panel(
        "First token, p95",
        "Within this time 95 of 100 requests get their first token.",
        "s",
        (Query(quantile(0.95, "exo_mesh_first_token_latency_seconds"), "p95"),),
        **_STAT,
        thresholds=((None, "green"), (5, "orange"), (10, "red")),
    ),
    Panel(
        "Failed requests",
        "Share of the requests that end in an error. A request that its client cancels is not an error.",
        "percentunit",
        (Query(_ERROR_SHARE, "failed"),),
        **_STAT,
        thresholds=((None, "green"), (0.01, "orange"), (0.05, "red")),
    ),
)

_REQUESTS = (
    Panel(
        "Requests by end",
        "Requests that end each second: stop and length are complete answers, cancelled means that the client left.",
        "reqps",
        (Query(total(rate("exo_mesh_requests_total"), "status"), "{{status}}"),),
        stacked=True,
    ),
    Panel(
        "Requests in progress by model",
        "Requests that have entered and not ended: waiting, computing a prompt or receiving tokens.",
        "short",
        (Query(total(series("exo_mesh_requests_in_progress"), "model"), "{{model}}"),),
        stacked=True,
    ),
    Panel(
        "Errors by type",
        "Requests that end in an error each second, by error code. docs/reference/errors.md explains each code.",
        "reqps",
        (Query(total(rate("exo_mesh_errors_total"), "type"), "{{type}}"),),
        stacked=True,
    ),
    Panel(
        "HTTP answers by status",
        "Answers of the HTTP API each second. 429 means that a queue is full, 401 that a key is missing or wrong.",
        "reqps",
        (Query(total(rate("exo_mesh_http_responses_total"), "code"), "{{code}}"),),
        stacked=True,
    ),
    Panel(
        "Waiting requests",
        "Requests in the queues of the rings, by model. A queue that stays long needs another instance of the model.",
        "short",
        (Query(total(series("exo_mesh_queue_depth"), "model"), "{{model}}"),),
        stacked=True,
    ),
    Panel(
        "Instances by state",
        "Placed models of the mesh: loading, ready or failed. Every node knows all, so the highest figure counts.",
        "short",
        (
            Query(
                f"sum by (state) (max by (model, state) ({series('exo_mesh_instances')}))",
                "{{state}}",
            ),
        ),
    ),
)

_SPEED = (
    Panel(
        "Output tokens per second by model",
        "Tokens that clients receive.",
        "short",
        (Query(total(rate("exo_mesh_tokens_generated_total"), "model"), "{{model}}"),),
        stacked=True,
    ),
    Panel(
        "Prompt tokens per second by model",
        "Prompt tokens of the requests that end.",
        "short",
        (Query(total(rate("exo_mesh_prompt_tokens_total"), "model"), "{{model}}"),),
        stacked=True,
    ),
    Panel(
        "Time to first token",
        "From a request's entry to its first token: queue, placement if the model is not loaded, and prompt.",
        "s",
        quantiles("exo_mesh_first_token_latency_seconds"),
    ),
    Panel(
        "Time of whole requests",
        "From a request's entry to its end, of any kind.",
        "s",
        quantiles("exo_mesh_request_latency_seconds"),
    ),
    Panel(
        "Time between tokens",
        "The gap between two tokens of a request. Above 0.2 s people read faster than the text arrives.",
        "s",
        quantiles("exo_mesh_inter_token_latency_seconds"),
    ),
    Panel(
        "Time in the queue",
        "From a request's arrival at the driver of a ring to its start.",
        "s",
        quantiles("exo_mesh_queue_wait_seconds"),
    ),
)

_TROUBLE = (
    Panel(
        "Live nodes as each node sees them",
        "The lines are equal in a healthy mesh. Lines that differ for minutes mean a network that is split.",
        "short",
        (Query(series("exo_mesh_nodes_active"), "{{node}}"),),
    ),
    Panel(
        "What is wrong",
        "Reasons of the health of the nodes, by code and level. docs/reference/health.md has the remedy for each code.",
        "short",
        (Query(f"{total(series('exo_mesh_health_reasons'), 'code', 'level')}", "{{code}} ({{level}})"),),
        stacked=True,
    ),
    Panel(
        "Recoveries",
        "Rings continued after a loss, in each interval. An outcome other than ready is the code of an error.",
        "short",
        (
            Query(
                total(events("exo_mesh_recoveries_total"), "cause", "outcome"),
                "{{cause}}: {{outcome}}",
            ),
        ),
        events=True,
    ),
    Panel(
        "Requests that were resumed",
        "Requests that continued after their ring was lost, each second. Clients see a pause, not an error.",
        "reqps",
        (Query(total(rate("exo_mesh_requests_resumed_total"), "model"), "{{model}}"),),
    ),
    Panel(
        "Restarts of runners",
        "Runners started for an instance that had one on the same node before, in each interval of the chart.",
        "short",
        (
            Query(
                total(events("exo_mesh_runner_restarts_total"), "node", "model"),
                "{{node}}: {{model}}",
            ),
        ),
        events=True,
    ),
    Panel(
        "Memory for new plans",
        "Memory that a new reservation could get on each node. 0 means that no further model fits there.",
        "bytes",
        (Query(series("exo_mesh_usable_memory_bytes"), "{{node}}"),),
        stacked=True,
    ),
)

OVERVIEW = Board(
    "overview",
    "exo-mesh: overview",
    "The whole mesh: nodes, requests, speed and problems.",
    (Row("Now", _NOW), Row("Requests", _REQUESTS), Row("Speed", _SPEED), Row("Trouble", _TROUBLE)),
)
